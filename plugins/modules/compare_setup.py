# Ansible finds documentation by a module file: that of this action is in compare_setup.yml.

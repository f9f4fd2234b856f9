# Ansible finds documentation by a module file: that of this action is in run_plan.yml.

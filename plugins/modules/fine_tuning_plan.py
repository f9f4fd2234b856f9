# Ansible finds documentation by a module file: that of this action is in fine_tuning_plan.yml.

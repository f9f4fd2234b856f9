# Ansible finds documentation by a module file: that of this action is in chat_data.yml.

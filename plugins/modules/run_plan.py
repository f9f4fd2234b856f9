"""Documentation of the action of the same name, which runs on the controller."""

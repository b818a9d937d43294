"""Pure algorithms of the control plane: functions of their arguments, without the state."""

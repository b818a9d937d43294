"""Pure algorithms of the control plane: functions of their arguments, independent of the pool state."""

"""What the control plane must not forget: the log, behind one seam; and which server leads on it."""

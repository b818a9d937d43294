"""What a kernel has to do for tenants, as the text of its commands: classes, filters of strangers, rules of flows."""

"""The run of a job: its identity, the folders that belong to it, and the rules that its file must satisfy."""

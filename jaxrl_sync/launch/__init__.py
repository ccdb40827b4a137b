"""Starting and supervising the processes of a run on one machine."""

"""The dashboard: a read-only local web server over folders of runs, its page, and the same page as one file."""

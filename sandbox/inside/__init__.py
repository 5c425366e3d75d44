"""The programs that run inside a sandbox, by any Python from 3.9 on. Each import costs a start milliseconds."""

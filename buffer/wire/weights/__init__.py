"""The weight channel's protocol, data layout and differences."""

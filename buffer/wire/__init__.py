"""What processes say to each other: messages, codec, sockets, weight manifests."""

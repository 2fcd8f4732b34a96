"""Who may take part in a federation over the network: keys, the roster, invites, and the proxy before the server."""

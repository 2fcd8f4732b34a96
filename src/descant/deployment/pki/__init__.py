"""Who may take part in a federation over the network: keys, the roster, invites, and the proxy before the server.

    roster = Roster.create("server", "recipe.toml", Terms(hosts=("fl.example.org",)))     # the organiser, once
    roster.invite("north", "north.invite")                                               # sent by a way one trusts
    with Proxy(upstream=8000).start("server") as proxy:                                  # before what listens at 8000
        roster.revoke("north")
        proxy.keep_up()
    Invite.read(Path("north.invite")).unpack(Path("silo"))                               # the party

What is on the disk is told in :mod:`.roster`, what passes and what does not in :mod:`.proxy`.
"""

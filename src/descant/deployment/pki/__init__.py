"""Access to a federation over the network: keys and certificates, the roster and invites.

    roster = Roster.create("server", "recipe.toml", FederationTerms(hosts=("fl.example.org",)))  # server operator, once
    roster.invite("north", "north.invite")                                     # send it over a channel that you trust
    with Proxy(upstream=8000).start("server") as proxy:                        # in front of a server at port 8000
        roster.revoke("north")
        proxy.reload_if_revoked()
    Invite.read(Path("north.invite")).unpack(Path("silo"))                     # the party

:mod:`.roster` describes the files on disk; :mod:`..nginx_proxy` describes which requests pass.
"""

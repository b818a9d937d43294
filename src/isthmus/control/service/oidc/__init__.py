"""Sign-in by OpenID Connect: the provider's requests, the check of its tokens, and the sessions that follow."""

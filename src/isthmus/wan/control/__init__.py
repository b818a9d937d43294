"""Decisions on the wide-area network, as pure functions: transport, gateway, admission of bandwidth."""

"""Environments: what answers the turns of a response, in processes of their own or over HTTP."""

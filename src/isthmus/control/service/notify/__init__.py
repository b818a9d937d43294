"""Delivery of notices: webhooks and e-mail, and the operator's settings of both."""

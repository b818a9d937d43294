"""The REST interface: middleware, endpoints, request and response bodies, and the event stream."""

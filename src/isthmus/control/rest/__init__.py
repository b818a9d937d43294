"""The REST interface: the gate, the endpoints, the bodies, the event stream."""

"""The protocol between the driver and its workers."""

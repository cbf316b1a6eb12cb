//! The pod-wide allocator: state machine, REST API, metrics, and podctl.

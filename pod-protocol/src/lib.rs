//! Joining the pod, leases, telemetry and commands over the pool.

//! Network engine: frontend, backend and NIC drivers.

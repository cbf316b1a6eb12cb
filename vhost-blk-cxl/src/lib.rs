//! Storage engine: frontend, backend and SSD drivers.

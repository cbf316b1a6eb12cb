//! Message channels over the pool, and request/response on top.

//! The pool: mapping, coherence, layout, regions and simulated memory.

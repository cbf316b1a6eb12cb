//! Starts QEMU virtual machines with devices from the pod.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| wadi_fuzz::net_channel(data));

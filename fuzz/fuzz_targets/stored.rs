#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| remote_agents_fuzz::run("stored", data));

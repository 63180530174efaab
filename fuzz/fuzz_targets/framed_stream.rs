#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cinch_fuzz::run("framed_stream", data));

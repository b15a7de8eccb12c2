//! diffusers' config.json.

#![no_main]

use fuzz::bounded;
use libfuzzer_sys::fuzz_target;
use vae_io::VaeConfig;

fuzz_target!(|bytes: &[u8]| {
    let Ok(text) = str::from_utf8(bytes) else {
        return;
    };
    // JSON's tree takes tens of bytes a byte.
    if let Ok(config) = bounded(bytes.len(), 64, 64 << 10, || VaeConfig::from_json(text)) {
        // What is accepted is valid, and its sizes can be computed with.
        config.validate().unwrap();
        assert!((1..=128).contains(&config.decoder().upscale()));
        let _ = config.family();
    }
});

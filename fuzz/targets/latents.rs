//! Files of latents, whose formats are told by their content.

#![no_main]

use fuzz::bounded;
use libfuzzer_sys::fuzz_target;
use vae_io::{Family, LatentFile, LatentsOptions, LatentsReading, VaeConfig};

/// What is deflated may be 16 times as large as in the file (`MAX_EXPANSION`), and values of f16 take twice that as f32 and
/// as much again in another order: 80 times. An opcode of one byte in a pickle makes a value of 56 bytes, in vectors that
/// double: 112 times, of 256 KiB at most.
const FACTOR: usize = 128;
/// Members that are unpacked however small they are (64 KiB), five times as above; the tables of inflate.
const SLACK: usize = 384 << 10;

fuzz_target!(|bytes: &[u8]| {
    // ComfyUI's convention follows from the name; a tensor is asked for by name.
    for (name, tensor) in [("a.latent", None), ("a", Some("latents"))] {
        let read = bounded(bytes.len(), FACTOR, SLACK, || {
            LatentFile::read_stream(bytes, name, tensor)
        });
        let Ok(latents) = read else {
            continue;
        };
        assert_eq!(latents.shape.iter().product::<usize>(), latents.values.len());
        assert!(matches!(latents.shape.len(), 3 | 4) && !latents.values.is_empty());
        assert!(latents.values.iter().all(|v| v.is_finite()));
        for family in Family::ALL {
            let model = VaeConfig::preset(family);
            let reading = LatentsReading::infer(&latents.shape, &latents.hint, &model, &LatentsOptions::default());
            if let Ok(reading) = reading {
                assert_eq!(reading.batched_shape().iter().product::<usize>(), latents.values.len());
            }
        }
    }
});

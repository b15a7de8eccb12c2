//! Damaged files of latents end in an error: never in a panic, and never in more memory than a small multiple of the
//! file's size.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::fs;
use std::io::{Cursor, Write};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use proptest::prelude::*;
use tempfile::TempDir;
use vae_io::{Error, LatentFile, LatentHeader, LatentSpace, LatentsOptions, LatentsReading, VaeConfig};

/// Counts the bytes that each thread has in use.
struct Counting;

thread_local! {
    static LIVE: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

fn count(bytes: isize) {
    LIVE.set(LIVE.get() + bytes);
    PEAK.set(PEAK.get().max(LIVE.get()));
}

// SAFETY: everything is passed on to the system's allocator; the counters neither allocate nor have destructors.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size as isize - layout.size() as isize);
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/fixtures")
        .join(name)
}

/// Files to damage: their extension, which matters for ComfyUI's only, and bytes.
static CORPUS: LazyLock<Vec<(&str, Vec<u8>)>> = LazyLock::new(|| {
    let npy = |dict: &str, bytes: usize| {
        let header = [
            b"\x93NUMPY\x01\x00",
            &(dict.len() as u16).to_le_bytes()[..],
            dict.as_bytes(),
        ]
        .concat();
        ("npy", [header, vec![0x3c; bytes]].concat())
    };
    let fixtures = [
        "sd-tiny/latents/chelsea.safetensors",
        "sd-tiny/latents/chelsea.comfyui.latent",
        "sd-tiny/latents/chelsea.comfyui-unversioned.latent",
        "sd-tiny/latents/chelsea.npy",
        "flux1-tiny/latents/coffee.packed-tokens.safetensors",
        "micro-sd/expected.safetensors",
    ];
    let own = [
        "float16.pt",
        "dict.pt",
        "permuted.pt",
        "protocol4.pt",
        "stored.npz",
        "deflated.npz",
        "fortran.npz",
    ];
    let own = own.map(|name| Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/files").join(name));
    let mut corpus: Vec<_> = fixtures
        .map(fixture)
        .into_iter()
        .chain(own)
        .map(|path| match path.extension() {
            Some(extension) if extension == "latent" => ("latent", fs::read(&path).unwrap()),
            _ => ("other", fs::read(&path).unwrap()),
        })
        .collect();
    corpus.push(npy(
        "{'descr': '<f4', 'fortran_order': True, 'shape': (1, 4, 2, 3), }\n",
        96,
    ));
    corpus.push(npy(
        "{'descr': '>f2', 'fortran_order': False, 'shape': (4, 3, 5), }\n",
        120,
    ));
    corpus.push(npy(
        "{'descr': '<f8', 'fortran_order': False, 'shape': (1, 4, 1, 2, 1)}",
        64,
    ));
    corpus
});

#[derive(Debug, Clone)]
enum Damage {
    Set(prop::sample::Index, u8),
    FlipBit(prop::sample::Index, u8),
    Insert(prop::sample::Index, Vec<u8>),
    Remove(prop::sample::Index, usize),
    Truncate(prop::sample::Index),
    /// Overwrites what is likely a length.
    Length(usize, u64),
}

fn damage() -> impl Strategy<Value = Damage> {
    let position = any::<prop::sample::Index>;
    let byte = prop_oneof![
        any::<u8>(),
        prop::sample::select(b"0123456789-()[]{}',:\"TFOVifuLe<>|= \n\0\xff".to_vec())
    ];
    let length = prop_oneof![
        any::<u64>(),
        0u64..512,
        Just(u64::MAX),
        Just(u64::MAX - 7),
        Just(100_000_000)
    ];
    prop_oneof![
        (position(), byte.clone()).prop_map(|(at, byte)| Damage::Set(at, byte)),
        (position(), 0u8..8).prop_map(|(at, bit)| Damage::FlipBit(at, bit)),
        (position(), prop::collection::vec(byte, 1..20)).prop_map(|(at, bytes)| Damage::Insert(at, bytes)),
        (position(), 1usize..20).prop_map(|(at, count)| Damage::Remove(at, count)),
        position().prop_map(Damage::Truncate),
        (prop::sample::select(vec![0usize, 6, 8]), length).prop_map(|(at, length)| Damage::Length(at, length)),
    ]
}

impl Damage {
    /// `head`: most damage goes to the first bytes, where the headers are.
    fn apply(&self, bytes: &mut Vec<u8>, head: usize) {
        let head = bytes.len().min(head);
        if head == 0 {
            return;
        }
        match self {
            Self::Set(at, byte) => bytes[at.index(head)] = *byte,
            Self::FlipBit(at, bit) => bytes[at.index(head)] ^= 1 << bit,
            Self::Insert(at, new) => {
                let at = at.index(head);
                bytes.splice(at..at, new.iter().copied());
            }
            Self::Remove(at, count) => {
                let at = at.index(head);
                bytes.drain(at..bytes.len().min(at + count));
            }
            Self::Truncate(at) => bytes.truncate(at.index(head)),
            Self::Length(at, length) => {
                if let Some(field) = bytes.get_mut(*at..at + 8) {
                    field.copy_from_slice(&length.to_le_bytes());
                }
            }
        }
    }
}

/// Reads `bytes` from a file with this extension and checks what it took.
fn read(extension: &str, bytes: &[u8]) -> vae_io::Result<LatentFile> {
    thread_local! {
        static FOLDER: TempDir = TempDir::new().unwrap();
    }
    let path = FOLDER.with(|folder| folder.path().join("latents").with_extension(extension));
    fs::write(&path, bytes).unwrap();
    let before = LIVE.get();
    PEAK.set(before);
    let read = LatentFile::read(&path);
    let used = (PEAK.get() - before) as usize;
    // What a deflated or repeated value may expand to (16 times its bytes) as f32 and once more in another order; the trees
    // of JSON and pickles. And members that are unpacked however small they are, and the tables of inflate.
    let allowed = 128 * bytes.len() + (384 << 10);
    assert!(used <= allowed, "{used} bytes in use for a file of {}", bytes.len());
    read
}

#[track_caller]
fn check(latents: &LatentFile) {
    assert_eq!(latents.shape.iter().product::<usize>(), latents.values.len());
    assert!(matches!(latents.shape.len(), 3 | 4) && !latents.values.is_empty());
    assert!(latents.values.iter().all(|v| v.is_finite()));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn damaged_files_neither_panic_nor_exhaust_memory(
        file in any::<prop::sample::Index>(),
        damage in prop::collection::vec(damage(), 1..5),
        head in prop::sample::select(vec![16usize, 128, 256, usize::MAX]),
    ) {
        let (extension, bytes) = file.get(&CORPUS);
        let mut bytes = bytes.clone();
        damage.iter().for_each(|damage| damage.apply(&mut bytes, head));
        if let Ok(latents) = read(extension, &bytes) {
            check(&latents);
        }
    }
}

proptest! {
    #[test]
    fn bytes_at_random_are_refused(
        magic in prop::sample::select(vec![&b""[..], b"\x93NUMPY", b"\x93NUMPY\x01\x00\x10\x00{'shape':(", b"PK\x03\x04"]),
        bytes in prop::collection::vec(any::<u8>(), 0..200),
    ) {
        let bytes = [magic, &bytes].concat();
        for extension in ["other", "latent"] {
            prop_assert!(read(extension, &bytes).is_err());
        }
    }
}

#[test]
fn json_that_nests_or_repeats_is_bounded() {
    let nested = "[".repeat(1 << 16);
    let array = format!("{{\"a\":[{}1]}}", "1,".repeat(1 << 16));
    let objects = format!("{{\"a\":{{{}\"z\":1}}}}", "\"k\":1,".repeat(1 << 14));
    for header in [nested, array, objects] {
        let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
        assert!(matches!(read("safetensors", &bytes), Err(Error::InvalidFile { .. })));
    }
}

/// An archive of members as they are.
fn archive(members: &[(&str, &[u8])], deflate: bool) -> Vec<u8> {
    let method = match deflate {
        true => zip::CompressionMethod::Deflated,
        false => zip::CompressionMethod::Stored,
    };
    let options = zip::write::SimpleFileOptions::default().compression_method(method);
    let mut zip = zip::ZipWriter::new(Cursor::new(Vec::new()));
    for (name, bytes) in members {
        zip.start_file(*name, options).unwrap();
        zip.write_all(bytes).unwrap();
    }
    zip.finish().unwrap().into_inner()
}

#[test]
fn pickles_that_flood_the_reader_are_bounded() {
    let length = 200_000;
    let repeated = |start: &[u8], unit: &[u8], end: &[u8]| {
        let units = unit.repeat(length / unit.len());
        archive(
            &[("a/data.pkl", &[b"\x80\x02", start, &units, end, b"."].concat())],
            false,
        )
    };
    let tensor = b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000N\
        K\x06tQK\0K\x01K\x01K\x02\x87K\x02K\x02K\x01\x87\x89}t";
    for bytes in [
        repeated(b"", b"]", b""),
        repeated(b"", b"}", b""),
        repeated(b"(", b"N", b"t"),
        repeated(b"", b"(", b""),
        repeated(b"]", b"\x94", b""),
        repeated(b"", b"]\x94", b""),
        repeated(b"]", b"r\xff\xff\xff\xff", b""),
        repeated(b"]q\0", b"h\0h\0\x86q\0", b""),
        repeated(b"}q\0", b"}(K\x01h\0K\x02h\0uq\0", b""),
        repeated(b"]", b"\x85", b""),
        // The call of one function on one tuple, again and again.
        repeated(
            &[&tensor[..34], b"q\0", &tensor[34..], b"q\x01"].concat(),
            b"h\0h\x01R",
            b"",
        ),
    ] {
        assert!(read("pt", &bytes).is_err());
    }
    // Sizes from a long list, which each tensor would copy.
    let sizes = repeated(
        b"ctorch._utils\n_rebuild_tensor_v2\n(K\0K\0(",
        b"K\x01",
        b"tq\0h\0\x89}tR",
    );
    assert!(matches!(read("pt", &sizes), Err(Error::InvalidFile { .. })));
}

#[test]
fn archives_that_would_unpack_to_more_are_bounded() {
    let header = b"\x93NUMPY\x01\x00\x40\x00{'descr': '<f2', 'fortran_order': True, 'shape': (1, 4, 512, 512)}   \n";
    let zeros = archive(&[("a.npy", &[&header[..], &vec![0; 2 << 20]].concat())], true);
    let message = read("npz", &zeros).unwrap_err().to_string();
    assert!(message.contains("would unpack to"), "{message}");
    // A thousand names for one member.
    let many: Vec<String> = (0..1000).map(|i| format!("{i}.npy")).collect();
    let many: Vec<_> = many.iter().map(|name| (name.as_str(), &header[..])).collect();
    assert!(read("npz", &archive(&many, true)).is_err());
}

#[test]
fn the_same_picture_reads_the_same_from_every_format() {
    let read = |name: &str| LatentFile::read(fixture(name)).unwrap();
    let plain = read("sd-tiny/latents/chelsea.safetensors");
    assert_eq!(plain.shape, [1, 4, 36, 56]);
    for name in ["chelsea.npy", "chelsea.npz", "chelsea.pt"] {
        let name = format!("sd-tiny/latents/{name}");
        let file = read(&name);
        assert_eq!(file.values, plain.values, "{name}");
        assert_eq!(
            LatentHeader::read(fixture(&name), None).unwrap(),
            file.header(),
            "{name}"
        );
    }
    let plain = read("flux1-tiny/latents/chelsea.safetensors").values;
    for name in ["chelsea.npy", "chelsea.npz", "chelsea.pt"] {
        assert_eq!(read(&format!("flux1-tiny/latents/{name}")).values, plain, "{name}");
    }
    let plain = read("sd-tiny/latents/chelsea.safetensors");

    let comfyui = read("sd-tiny/latents/chelsea.comfyui.latent");
    assert_eq!(comfyui.hint.space, Some(LatentSpace::Vae));
    let unversioned = read("sd-tiny/latents/chelsea.comfyui-unversioned.latent");
    let scaled = plain.values.iter().map(|v| v / 0.18215);
    for ((a, b), c) in comfyui.values.iter().zip(&unversioned.values).zip(scaled) {
        // A few roundings of f32, of values up to about 30.
        assert!((a - b).abs() <= 1e-5 && (a - c).abs() <= 1e-5, "{a} {b} {c}");
    }

    let flux2 = read("flux2-tiny/latents/chelsea.comfyui.latent");
    assert_eq!(flux2.hint.space, Some(LatentSpace::Diffusion));
    let tokens = read("flux2-tiny/latents/coffee.packed-tokens.safetensors");
    assert_eq!((tokens.hint.height, tokens.hint.width), (Some(400), Some(592)));
    assert_eq!(tokens.shape, [1, 925, 128]);
}

#[test]
fn every_fixture_reads_as_the_image_it_was_saved_from() {
    for (model, name, line) in [
        (
            "sd-tiny",
            "chelsea.safetensors",
            "diffusion space, [1, 4, 36, 56] map, image 448x288",
        ),
        (
            "sd-tiny",
            "chelsea.comfyui.latent",
            "vae space, [1, 4, 36, 56] map, image 448x288",
        ),
        (
            "flux1-tiny",
            "chelsea.npy",
            "diffusion space, [1, 16, 36, 56] map, image 448x288",
        ),
        (
            "flux1-tiny",
            "coffee.packed-tokens.safetensors",
            "diffusion space, [1, 925, 64] tokens in 25 rows of 37, image 592x400",
        ),
        (
            "flux2-tiny",
            "coffee.packed-tokens.safetensors",
            "diffusion space, [1, 925, 128] batch-norm normalised tokens in 25 rows of 37, image 592x400",
        ),
        (
            "flux2-tiny",
            "chelsea.comfyui.latent",
            "diffusion space, [1, 128, 18, 28] batch-norm normalised map, image 448x288",
        ),
        (
            "flux2-tiny",
            "chelsea.vae-space.safetensors",
            "vae space, [1, 32, 36, 56] map, image 448x288",
        ),
    ] {
        let config = VaeConfig::read(fixture(model).join("config.json")).unwrap();
        let latents = LatentFile::read(fixture(model).join("latents").join(name)).unwrap();
        let reading = LatentsReading::infer(&latents.shape, &latents.hint, &config, &LatentsOptions::default());
        assert_eq!(reading.unwrap().to_string(), line, "{model}/{name}");
    }
}

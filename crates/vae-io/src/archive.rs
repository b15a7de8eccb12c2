//! Zip archives in memory, which .npz and .pt files are.

use std::io::{Cursor, Read};

use zip::{CompressionMethod, ZipArchive};

/// Values that a file holds more than once, by compression or by views that repeat them, may take this many times the
/// bytes they have in the file. Latents deflate to no less than a quarter even where bf16 values were widened to f64; what
/// goes beyond is made to exhaust memory, or blank.
pub(crate) const MAX_EXPANSION: usize = 16;

/// Members of this size are unpacked however well they are compressed.
const ALWAYS_UNPACKED: usize = 64 << 10;

/// The members of an archive, by name.
pub(crate) struct Archive<'a> {
    bytes: &'a [u8],
    zip: ZipArchive<Cursor<&'a [u8]>>,
}

impl<'a> Archive<'a> {
    /// Reads the directory of an archive; the error is the reason why there is none.
    pub fn open(bytes: &'a [u8]) -> Result<Self, String> {
        let zip = ZipArchive::new(Cursor::new(bytes)).map_err(|e| format!("it is a damaged zip archive: {e}"))?;
        Ok(Self { bytes, zip })
    }

    /// The names of all members.
    pub fn names(&self) -> Result<Vec<String>, String> {
        let names = self.zip.file_names().map(|name| name.map(Into::into));
        names
            .collect::<Result<_, _>>()
            .map_err(|e| format!("a member's name is malformed: {e}"))
    }

    /// The bytes of a member, unpacked and checked against their checksum.
    pub fn unpacked(&mut self, name: &str) -> Result<Vec<u8>, String> {
        let available = self.bytes.len();
        let invalid = |e: &dyn std::fmt::Display| format!("its member `{name}` cannot be read: {e}");
        let member = self.zip.by_name(name).map_err(|e| invalid(&e))?;
        let packed = usize::try_from(member.compressed_size())
            .unwrap_or(available)
            .min(available);
        let limit = packed.saturating_mul(MAX_EXPANSION).saturating_add(ALWAYS_UNPACKED);
        let size = usize::try_from(member.size()).ok().filter(|&size| size <= limit).ok_or_else(|| {
            format!(
                "its member `{name}` would unpack to {} bytes, {packed} are compressed, and more than {MAX_EXPANSION} \
                 times is refused; save it uncompressed (numpy.savez)",
                member.size()
            )
        })?;
        let mut unpacked = Vec::with_capacity(size);
        // One byte more than declared: reaching the end is what checks the checksum.
        let read = member.take(size as u64 + 1).read_to_end(&mut unpacked);
        read.map_err(|e| invalid(&e))?;
        if unpacked.len() != size {
            return Err(invalid(&format_args!(
                "it does not unpack to the {size} bytes it claims"
            )));
        }
        Ok(unpacked)
    }

    /// The bytes of a member that is stored as it is, in place; `None` if there is none of that name.
    pub fn stored(&mut self, name: &str) -> Result<Option<&'a [u8]>, String> {
        let Some(index) = self.zip.index_for_name(name) else {
            return Ok(None);
        };
        let member = self.zip.by_index_raw(index);
        let member = member.map_err(|e| format!("its member `{name}` cannot be read: {e}"))?;
        if member.compression() != CompressionMethod::Stored || member.encrypted() {
            return Err(format!(
                "its member `{name}` is compressed, which torch.save never does"
            ));
        }
        let bytes = member.data_start().and_then(|start| {
            let start = usize::try_from(start).ok()?;
            let end = start.checked_add(usize::try_from(member.size()).ok()?)?;
            self.bytes.get(start..end)
        });
        bytes
            .map(Some)
            .ok_or_else(|| format!("its member `{name}` goes past the end of the file"))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::io::Write;

    use zip::{ZipWriter, write::SimpleFileOptions};

    use super::*;

    /// An archive of these members, all of them deflated or none.
    pub fn zipped(deflate: bool, members: &[(&str, &[u8])]) -> Vec<u8> {
        let method = if deflate {
            CompressionMethod::Deflated
        } else {
            CompressionMethod::Stored
        };
        let options = SimpleFileOptions::default().compression_method(method);
        let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
        for (name, bytes) in members {
            zip.start_file(*name, options).unwrap();
            zip.write_all(bytes).unwrap();
        }
        zip.finish().unwrap().into_inner()
    }

    fn unpack(bytes: &[u8], name: &str) -> Result<Vec<u8>, String> {
        Archive::open(bytes)?.unpacked(name)
    }

    #[test]
    fn stored_and_deflated_members_are_read() {
        let text = b"no bomb, no bomb, no bomb".as_slice();
        for deflate in [false, true] {
            let bytes = zipped(deflate, &[("a", b"other"), ("b/c", text)]);
            assert_eq!(Archive::open(&bytes).unwrap().names().unwrap(), ["a", "b/c"]);
            assert_eq!(unpack(&bytes, "b/c").unwrap(), text);
        }
        let bytes = zipped(false, &[("a", b"other"), ("b/c", text)]);
        let mut archive = Archive::open(&bytes).unwrap();
        assert_eq!(archive.stored("b/c").unwrap(), Some(text));
        assert_eq!(archive.stored("b").unwrap(), None);
        let bytes = zipped(true, &[("a", text)]);
        let error = Archive::open(&bytes).unwrap().stored("a").unwrap_err();
        assert!(error.contains("`a` is compressed"), "{error}");
    }

    #[test]
    fn a_zip_bomb_is_refused_before_it_is_unpacked() {
        let bomb = zipped(true, &[("zeros", &vec![0; 8 << 20])]);
        assert!(bomb.len() < 10_000);
        let error = unpack(&bomb, "zeros").unwrap_err();
        assert!(error.contains("would unpack to 8388608 bytes"), "{error}");
        // What is small enough is not asked how it was compressed.
        assert_eq!(
            unpack(&zipped(true, &[("zeros", &vec![0; 64 << 10])]), "zeros")
                .unwrap()
                .len(),
            64 << 10
        );
    }

    #[test]
    fn a_member_that_lies_about_its_size_is_refused() {
        let text = [7; 1000];
        for deflate in [false, true] {
            let bytes = zipped(deflate, &[("a", &text)]);
            let directory = bytes.windows(4).rposition(|w| w == b"PK\x01\x02").unwrap();
            for size in [999u32, 1001, u32::MAX] {
                let mut lying = bytes.clone();
                lying[directory + 24..directory + 28].copy_from_slice(&size.to_le_bytes());
                assert!(unpack(&lying, "a").is_err(), "{size}");
            }
        }
    }

    #[test]
    fn a_damaged_member_is_refused_by_its_checksum() {
        let mut bytes = zipped(false, &[("a", &[7; 1000])]);
        let data = bytes.windows(8).position(|w| w == [7; 8]).unwrap();
        bytes[data + 500] = 8;
        let error = unpack(&bytes, "a").unwrap_err();
        assert!(error.contains("hecksum"), "{error}");
    }

    #[test]
    fn an_archive_cut_anywhere_is_refused() {
        let bytes = zipped(true, &[("a", b"some bytes"), ("b", b"others")]);
        for end in 0..bytes.len() {
            assert!(Archive::open(&bytes[..end]).is_err(), "cut at {end}");
        }
    }
}

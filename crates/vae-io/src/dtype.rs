use std::{fmt, str::FromStr};

/// Floating-point types that latents and checkpoints are stored in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE half precision.
    F16,
    /// The upper half of an f32.
    BF16,
    /// IEEE single precision.
    F32,
    /// IEEE double precision.
    F64,
}

impl DType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Self::F16 | Self::BF16 => 2,
            Self::F32 => 4,
            Self::F64 => 8,
        }
    }

    /// Widens (or, for f64, rounds) little-endian bytes of this type to f32, appending to `out`.
    ///
    /// Trailing bytes that do not fill an element are ignored; callers check lengths against the header first.
    pub fn extend_f32(self, bytes: &[u8], out: &mut Vec<f32>) {
        match self {
            Self::F16 => out.extend(elements(bytes).map(|b| half::f16::from_le_bytes(b).to_f32())),
            Self::BF16 => out.extend(elements(bytes).map(|b| half::bf16::from_le_bytes(b).to_f32())),
            Self::F32 => out.extend(elements(bytes).map(f32::from_le_bytes)),
            Self::F64 => out.extend(elements(bytes).map(|b| f64::from_le_bytes(b) as f32)),
        }
    }
}

fn elements<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = [u8; N]> + '_ {
    bytes.as_chunks::<N>().0.iter().copied()
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F16 => "f16",
            Self::BF16 => "bf16",
            Self::F32 => "f32",
            Self::F64 => "f64",
        })
    }
}

impl FromStr for DType {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        [Self::F16, Self::BF16, Self::F32, Self::F64]
            .into_iter()
            .find(|dtype| dtype.to_string() == name)
            .ok_or_else(|| format!("`{name}` is not a type, use f32, f16 or bf16"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for name in ["f16", "bf16", "f32", "f64"] {
            assert_eq!(name.parse::<DType>().unwrap().to_string(), name);
        }
        assert!("F32".parse::<DType>().is_err());
    }

    #[test]
    fn every_type_reads_little_endian() {
        let read = |dtype: DType, bytes: &[u8]| {
            let mut out = Vec::new();
            dtype.extend_f32(bytes, &mut out);
            out
        };
        assert_eq!(read(DType::F16, &[0x00, 0x3e, 0x00, 0xc0]), [1.5, -2.0]);
        assert_eq!(read(DType::BF16, &[0xc0, 0x3f, 0x00, 0xc0]), [1.5, -2.0]);
        assert_eq!(read(DType::F32, &1.5f32.to_le_bytes()), [1.5]);
        assert_eq!(read(DType::F64, &0.1f64.to_le_bytes()), [0.1]);
    }
}

//! NumPy's .npy format, as far as arrays of floats go.
//!
//! <https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html>

use crate::DType;
use crate::strided::row_major;

/// A .npy file in memory whose header is parsed and whose data is as long as the header says.
#[derive(Debug)]
pub(crate) struct Array<'a> {
    pub dtype: DType,
    pub shape: Vec<usize>,
    big_endian: bool,
    fortran_order: bool,
    data: &'a [u8],
}

impl<'a> Array<'a> {
    /// Parses versions 1.0, 2.0 and 3.0; the error is the reason why `file` is not an array of floats.
    ///
    /// Nothing in proportion to the shape is allocated here.
    pub fn parse(file: &'a [u8]) -> Result<Self, String> {
        let (header, data) = split(file)?;
        let Header {
            descr,
            fortran_order,
            shape,
        } = Parser { rest: header }.header()?;
        let (dtype, big_endian) = element(descr)?;

        let expected = shape.iter().try_fold(dtype.size(), |size, &d| size.checked_mul(d));
        if expected != Some(data.len()) {
            let expected = expected.map_or("more bytes than can be addressed".to_owned(), |n| format!("{n} bytes"));
            return Err(format!(
                "shape {shape:?} of {dtype} takes {expected}, the file has {} after its header",
                data.len()
            ));
        }
        Ok(Self {
            dtype,
            shape,
            big_endian,
            fortran_order,
            data,
        })
    }

    /// The elements as f32, in row-major order.
    pub fn values(&self) -> Vec<f32> {
        let mut values = Vec::with_capacity(self.data.len() / self.dtype.size());
        if self.big_endian {
            let mut swapped = self.data.to_vec();
            swapped.chunks_exact_mut(self.dtype.size()).for_each(<[u8]>::reverse);
            self.dtype.extend_f32(&swapped, &mut values);
        } else {
            self.dtype.extend_f32(self.data, &mut values);
        }
        if self.fortran_order {
            row_major(values, &self.shape, &column_major_strides(&self.shape))
        } else {
            values
        }
    }
}

/// The header of a version 1.0 file that holds row-major '<f4' data of this shape; the data follows it.
pub(crate) fn f32_header(shape: &[usize]) -> Vec<u8> {
    let dims: String = shape.iter().map(|d| format!("{d}, ")).collect();
    // Python writes (3,) but (3, 4).
    let dims = if shape.len() == 1 {
        dims.trim_end()
    } else {
        dims.trim_end_matches(", ")
    };
    let dict = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({dims}), }}");

    // The data starts at a multiple of 64 bytes; a newline ends the header.
    let preamble = MAGIC.len() + 4;
    let length = (preamble + dict.len() + 1).next_multiple_of(64) - preamble;
    let mut header = Vec::with_capacity(preamble + length);
    header.extend(MAGIC);
    header.extend([1, 0]);
    header.extend(
        u16::try_from(length)
            .expect("shapes have a few dimensions")
            .to_le_bytes(),
    );
    header.extend(dict.bytes());
    header.resize(preamble + length - 1, b' ');
    header.push(b'\n');
    header
}

const MAGIC: &[u8] = b"\x93NUMPY";

/// The header's dictionary and the data.
fn split(file: &[u8]) -> Result<(&[u8], &[u8]), String> {
    const TRUNCATED: &str = "the header is truncated";
    let rest = file.strip_prefix(MAGIC).ok_or("it does not start with \\x93NUMPY")?;
    let (version, rest) = rest.split_first_chunk::<2>().ok_or(TRUNCATED)?;
    let (length, rest) = match version {
        [1, 0] => {
            let (length, rest) = rest.split_first_chunk().ok_or(TRUNCATED)?;
            (u32::from(u16::from_le_bytes(*length)), rest)
        }
        [2 | 3, 0] => {
            let (length, rest) = rest.split_first_chunk().ok_or(TRUNCATED)?;
            (u32::from_le_bytes(*length), rest)
        }
        [major, minor] => return Err(format!("version {major}.{minor} is unknown; supported: 1.0, 2.0, 3.0")),
    };
    let length = usize::try_from(length).map_err(|_| TRUNCATED)?;
    rest.split_at_checked(length).ok_or_else(|| TRUNCATED.to_owned())
}

/// What `descr` says of the elements: their type, and whether they are big-endian.
fn element(descr: &[u8]) -> Result<(DType, bool), String> {
    let native = cfg!(target_endian = "big");
    let (big_endian, kind) = match descr {
        [b'<', kind @ ..] => (false, kind),
        [b'>', kind @ ..] => (true, kind),
        // As NumPy reads them: '=' and no prefix are the machine's own order, and so is '|' on a type that has one.
        [b'=' | b'|', kind @ ..] | kind => (native, kind),
    };
    let shown = descr.escape_ascii();
    match kind {
        b"f2" => Ok((DType::F16, big_endian)),
        b"f4" => Ok((DType::F32, big_endian)),
        b"f8" => Ok((DType::F64, big_endian)),
        b"bfloat16" => Ok((DType::BF16, big_endian)),
        [b'O', ..] => Err("object arrays are pickles; save a float array".to_owned()),
        [b'V', ..] => Err(format!(
            "'{shown}' elements have no type (NumPy saves bfloat16 like this); save them as float32"
        )),
        _ => Err(format!(
            "its elements are '{shown}'; latents must be floating point: '<f2', '<f4' or '<f8'"
        )),
    }
}

/// Where the next element along each dimension lies in column-major order.
fn column_major_strides(shape: &[usize]) -> Vec<usize> {
    let mut next = 1;
    let mut step = |size| {
        let stride = next;
        next *= size;
        stride
    };
    shape.iter().map(|&size| step(size)).collect()
}

struct Header<'a> {
    descr: &'a [u8],
    fortran_order: bool,
    shape: Vec<usize>,
}

/// Reads the header's dictionary: a Python literal of a known form, and nothing else of Python.
struct Parser<'a> {
    rest: &'a [u8],
}

impl<'a> Parser<'a> {
    fn header(mut self) -> Result<Header<'a>, String> {
        let (mut descr, mut fortran_order, mut shape) = (None, None, None);
        self.expect(b'{')?;
        while !self.eat(b'}') {
            let key = self.string()?;
            self.expect(b':')?;
            let repeated = match key {
                b"descr" => descr.replace(self.descr()?).is_some(),
                b"fortran_order" => fortran_order.replace(self.boolean()?).is_some(),
                b"shape" => shape.replace(self.tuple()?).is_some(),
                _ => return Err(format!("the header has an unknown key '{}'", key.escape_ascii())),
            };
            if repeated {
                return Err(format!("the header has '{}' twice", key.escape_ascii()));
            }
            if !self.eat(b',') {
                self.expect(b'}')?;
                break;
            }
        }
        self.skip_space();
        if !self.rest.is_empty() {
            return Err(self.unexpected("the end of the header"));
        }
        let missing = |key| format!("the header lacks '{key}'");
        Ok(Header {
            descr: descr.ok_or_else(|| missing("descr"))?,
            fortran_order: fortran_order.ok_or_else(|| missing("fortran_order"))?,
            shape: shape.ok_or_else(|| missing("shape"))?,
        })
    }

    fn descr(&mut self) -> Result<&'a [u8], String> {
        self.skip_space();
        match self.rest {
            [b'[' | b'(', ..] => Err("structured arrays are not latents; save a float array".to_owned()),
            _ => self.string(),
        }
    }

    /// A quoted string without escapes.
    fn string(&mut self) -> Result<&'a [u8], String> {
        self.skip_space();
        let (&quote, rest) = match self.rest {
            [quote @ (b'\'' | b'"'), rest @ ..] => (quote, rest),
            _ => return Err(self.unexpected("a quoted string")),
        };
        let end = rest.iter().position(|&b| b == quote || b == b'\\' || b == b'\n');
        match end {
            Some(end) if rest[end] == quote => {
                self.rest = &rest[end + 1..];
                Ok(&rest[..end])
            }
            _ => Err(self.unexpected("a quoted string")),
        }
    }

    fn boolean(&mut self) -> Result<bool, String> {
        self.skip_space();
        for (word, value) in [(&b"True"[..], true), (b"False", false)] {
            if let Some(rest) = self.rest.strip_prefix(word) {
                self.rest = rest;
                return Ok(value);
            }
        }
        Err(self.unexpected("True or False"))
    }

    /// A tuple of sizes: `()`, `(3,)`, `(3, 4)`, but not `(3)`, which is a number in Python.
    fn tuple(&mut self) -> Result<Vec<usize>, String> {
        self.expect(b'(')?;
        let mut sizes = Vec::new();
        while !self.eat(b')') {
            sizes.push(self.size()?);
            if !self.eat(b',') {
                if sizes.len() == 1 {
                    return Err(self.unexpected("a comma"));
                }
                self.expect(b')')?;
                break;
            }
        }
        Ok(sizes)
    }

    fn size(&mut self) -> Result<usize, String> {
        self.skip_space();
        let digits = self.rest.iter().take_while(|b| b.is_ascii_digit()).count();
        let (number, rest) = self.rest.split_at(digits);
        let size = str::from_utf8(number).ok().and_then(|n| n.parse().ok());
        let size = size.ok_or_else(|| self.unexpected("a size"))?;
        // Python 2 wrote long integers as 4L.
        self.rest = rest.strip_prefix(b"L").unwrap_or(rest);
        Ok(size)
    }

    fn eat(&mut self, byte: u8) -> bool {
        self.skip_space();
        match self.rest.strip_prefix(&[byte]) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    fn expect(&mut self, byte: u8) -> Result<(), String> {
        if self.eat(byte) {
            return Ok(());
        }
        Err(self.unexpected(&format!("'{}'", byte.escape_ascii())))
    }

    fn skip_space(&mut self) {
        self.rest = self.rest.trim_ascii_start();
    }

    fn unexpected(&self, expected: &str) -> String {
        let found = &self.rest[..self.rest.len().min(16)];
        if found.is_empty() {
            return format!("the header ends where {expected} should be");
        }
        format!("the header has `{}` where {expected} should be", found.escape_ascii())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn file(version: u8, dict: &str, data: &[u8]) -> Vec<u8> {
        let mut file = MAGIC.to_vec();
        file.extend([version, 0]);
        match version {
            1 => file.extend((dict.len() as u16).to_le_bytes()),
            _ => file.extend((dict.len() as u32).to_le_bytes()),
        }
        file.extend(dict.bytes());
        file.extend(data);
        file
    }

    fn le_bytes(values: impl IntoIterator<Item = f32>) -> Vec<u8> {
        values.into_iter().flat_map(f32::to_le_bytes).collect()
    }

    fn values(file: &[u8]) -> Vec<f32> {
        Array::parse(file).expect("a valid file").values()
    }

    fn reason(dict: &str, data: &[u8]) -> String {
        Array::parse(&file(1, dict, data)).expect_err("an invalid file")
    }

    const DICT: &str = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 1), }\n";

    #[test]
    fn every_version_reads_the_same() {
        let data = le_bytes([1.5, -2.0]);
        for version in 1..=3 {
            assert_eq!(values(&file(version, DICT, &data)), [1.5, -2.0]);
        }
    }

    #[test]
    fn header_needs_no_particular_order_or_whitespace() {
        let data = le_bytes([1.0, 2.0]);
        for dict in [
            "{'shape':(2,1),'descr':'<f4','fortran_order':False}",
            "  {  \"fortran_order\" : False , 'shape' : ( 2 , 1 , ) ,\n 'descr' : \"<f4\" , }  \n",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (2L, 1L)}",
        ] {
            assert_eq!(values(&file(1, dict, &data)), [1.0, 2.0], "{dict}");
        }
    }

    #[test]
    fn every_float_type_and_byte_order_reads() {
        let read = |descr: &str, data: &[u8]| {
            let dict = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': (1,)}}");
            values(&file(1, &dict, data))
        };
        assert_eq!(read("<f2", &[0x00, 0x3e]), [1.5]);
        assert_eq!(read(">f2", &[0x3e, 0x00]), [1.5]);
        assert_eq!(read("<f4", &1.5f32.to_le_bytes()), [1.5]);
        assert_eq!(read(">f4", &1.5f32.to_be_bytes()), [1.5]);
        assert_eq!(read("=f4", &1.5f32.to_ne_bytes()), [1.5]);
        assert_eq!(read("f4", &1.5f32.to_ne_bytes()), [1.5]);
        assert_eq!(read("|f4", &1.5f32.to_ne_bytes()), [1.5]);
        assert_eq!(read("<f8", &0.1f64.to_le_bytes()), [0.1]);
        assert_eq!(read(">f8", &0.1f64.to_be_bytes()), [0.1]);
        assert_eq!(read("bfloat16", &0x3fc0u16.to_ne_bytes()), [1.5]);
    }

    #[test]
    fn fortran_order_is_not_read_as_row_major() {
        // [[1, 2, 3], [4, 5, 6]] column by column.
        let data = le_bytes([1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
        let dict = "{'descr': '<f4', 'fortran_order': True, 'shape': (2, 3)}";
        assert_eq!(values(&file(1, dict, &data)), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    }

    #[test]
    fn what_is_not_floating_point_is_refused_by_name() {
        let of = |descr: &str| {
            reason(
                &format!("{{'descr': {descr}, 'fortran_order': False, 'shape': (1,)}}"),
                &[0; 8],
            )
        };
        assert_eq!(of("'|O'"), "object arrays are pickles; save a float array");
        assert!(of("'<V2'").contains("bfloat16"));
        assert!(of("[('a', '<f4')]").contains("structured"));
        for descr in ["'<i8'", "'|u1'", "'|b1'", "'<c8'", "'<f16'", "'|S8'", "''", "'<'"] {
            assert!(of(descr).contains("floating point"), "{descr}: {}", of(descr));
        }
    }

    #[test]
    fn a_shape_that_lies_is_refused() {
        assert_eq!(
            reason(DICT, &[0; 7]),
            "shape [2, 1] of f32 takes 8 bytes, the file has 7 after its header"
        );
        assert!(reason(DICT, &[0; 9]).contains("has 9"));
        let huge = "{'descr': '<f4', 'fortran_order': False, 'shape': (4611686018427387904, 4)}";
        assert!(reason(huge, &[0; 8]).contains("more bytes than can be addressed"));
    }

    #[test]
    fn a_malformed_header_is_refused() {
        for (dict, expected) in [
            ("", "ends where '{'"),
            ("{'descr': '<f4'", "ends where '}'"),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 1)} x", "`x`"),
            ("{'descr': '<f4', 'fortran_order': False}", "lacks 'shape'"),
            ("{'descr': '<f4', 'descr': '<f4'}", "'descr' twice"),
            ("{'descr': '<f4', 'order': 1}", "unknown key 'order'"),
            ("{'fortran_order': 1}", "True or False"),
            ("{'shape': (2)}", "a comma"),
            ("{'shape': (-2, 1)}", "a size"),
            ("{'shape': (99999999999999999999999, 1)}", "a size"),
            ("{'shape': [2, 1]}", "'('"),
            ("{'descr': '<f4}", "a quoted string"),
            ("{'descr': '\\x3cf4'}", "a quoted string"),
        ] {
            let reason = reason(dict, &[]);
            assert!(reason.contains(expected), "{dict}: {reason}");
        }
    }

    #[test]
    fn a_file_cut_anywhere_is_refused() {
        let whole = file(1, DICT, &[0; 8]);
        for end in 0..whole.len() {
            assert!(Array::parse(&whole[..end]).is_err(), "cut at {end}");
        }
        let past_the_end = file(2, DICT, &[]);
        let mut lying = past_the_end.clone();
        lying[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(Array::parse(&lying).expect_err("truncated"), "the header is truncated");
        assert!(
            Array::parse(&file(4, DICT, &[0; 8]))
                .expect_err("version")
                .contains("4.0")
        );
    }

    #[test]
    fn written_header_is_what_numpy_writes() {
        let header = f32_header(&[1, 3, 8, 16]);
        assert_eq!(header.len() % 64, 0);
        assert_eq!(&header[..10], b"\x93NUMPY\x01\x00\x76\x00");
        let text = String::from_utf8_lossy(&header[10..]);
        assert_eq!(
            text.trim_end(),
            "{'descr': '<f4', 'fortran_order': False, 'shape': (1, 3, 8, 16), }"
        );
        assert!(text.ends_with(" \n"));
        assert!(String::from_utf8_lossy(&f32_header(&[5])).contains("'shape': (5,), }"));
    }

    proptest! {
        #[test]
        fn both_orders_round_trip(shape in proptest::collection::vec(1usize..6, 0..5)) {
            let len: usize = shape.iter().product();
            let row_major: Vec<f32> = (0..len).map(|i| i as f32).collect();

            let mut written = f32_header(&shape);
            written.extend(le_bytes(row_major.clone()));
            let read = Array::parse(&written).unwrap();
            prop_assert_eq!(&read.shape, &shape);
            prop_assert_eq!(read.values(), row_major.clone());

            // Element [i, j, k] lies at i + shape[0] * (j + shape[1] * k).
            let mut columns = vec![0.0; len];
            for (position, &value) in row_major.iter().enumerate() {
                let (mut rest, mut index) = (position, vec![0; shape.len()]);
                for d in (0..shape.len()).rev() {
                    index[d] = rest % shape[d];
                    rest /= shape[d];
                }
                let at = (0..shape.len()).rev().fold(0, |at, d| at * shape[d] + index[d]);
                columns[at] = value;
            }
            let mut fortran = written[..written.len() - 4 * len].to_vec();
            let at = fortran.windows(5).position(|w| w == b"False").unwrap();
            fortran[at..at + 5].copy_from_slice(b"True ");
            fortran.extend(le_bytes(columns));
            prop_assert_eq!(Array::parse(&fortran).unwrap().values(), row_major);
        }
    }
}

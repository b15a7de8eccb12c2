//! The pickles of `torch.save`, read and never run.
//!
//! A pickle is a program for a stack machine that can call any function of Python. Here nothing is called: the calls that
//! make tensors are known and understood, and what any other call makes is an object that is no tensor. The opcodes are
//! those that Python's pickler writes in protocols 2 (`torch.save`'s own) to 5.
//!
//! Not the crate `pytorch-reader` (0.22.1): it refuses a file that holds just a tensor, which is what most files of
//! latents hold, and a deflated pickle of 90 KB makes it take more than 20 GB.
//!
//! <https://docs.python.org/3/library/pickletools.html>,
//! <https://github.com/pytorch/pytorch/blob/main/torch/_utils.py>

use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

/// What a file holds.
#[derive(Debug)]
pub(super) enum Saved<'a> {
    /// A tensor and nothing else.
    Tensor(Rc<Tensor<'a>>),
    /// The tensors of a dict by their names; its other values are left out.
    Dict(BTreeMap<&'a str, Rc<Tensor<'a>>>),
}

/// A strided view of a storage, as the pickle describes it.
#[derive(Debug, PartialEq)]
pub(super) struct Tensor<'a> {
    pub storage: Storage<'a>,
    /// In elements, as the strides.
    pub offset: usize,
    pub shape: Vec<usize>,
    /// As many as dimensions.
    pub strides: Vec<usize>,
}

/// Where a tensor's values are.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Storage<'a> {
    /// The name of PyTorch's class, "FloatStorage".
    pub class: &'a str,
    pub key: &'a str,
    pub elements: usize,
}

const MAX_DIMENSIONS: usize = 8;

/// Reads a pickle; the error is a sentence that lacks its subject.
pub(super) fn read(pickle: &[u8]) -> Result<Saved<'_>, String> {
    let mut machine = Machine {
        rest: pickle,
        values: vec![Value::Plain],
        stack: Vec::new(),
        marks: Vec::new(),
        memo: HashMap::new(),
    };
    let root = machine.run()?;
    let found = match &machine.values[root] {
        Value::Tensor(tensor) => return Ok(Saved::Tensor(Rc::clone(tensor))),
        Value::Dict(items) => {
            let tensors =
                items
                    .iter()
                    .filter_map(|&(key, value)| match (&machine.values[key], &machine.values[value]) {
                        (Value::Text(name), Value::Tensor(tensor)) => Some((*name, Rc::clone(tensor))),
                        _ => None,
                    });
            return Ok(Saved::Dict(tensors.collect()));
        }
        Value::Object(module, name) => format!("an object of {module}.{name}"),
        Value::Sequence(_) => "a list".to_owned(),
        _ => "no tensor".to_owned(),
    };
    Err(format!("holds {found}; save a tensor, or a dict with tensors"))
}

/// A place in [`Machine::values`].
type Id = usize;

/// None, booleans, floats, bytes: what tensors are not made of. One value stands for all of them.
const PLAIN: Id = 0;

#[derive(Debug)]
enum Value<'a> {
    Plain,
    Int(i64),
    Text(&'a str),
    /// A class or function: its module and name.
    Global(&'a str, &'a str),
    /// What a call made that is not understood here: the function's module and name.
    Object(&'a str, &'a str),
    /// A tuple, list or set.
    Sequence(Vec<Id>),
    Dict(Vec<(Id, Id)>),
    Storage(Storage<'a>),
    Tensor(Rc<Tensor<'a>>),
}

/// Values are made once and referred to by their [`Id`]s, as in Python: a pickle can build no more than it spells out.
struct Machine<'a> {
    rest: &'a [u8],
    values: Vec<Value<'a>>,
    stack: Vec<Id>,
    /// Heights of the stack.
    marks: Vec<usize>,
    memo: HashMap<u32, Id>,
}

impl<'a> Machine<'a> {
    /// Runs to the end of the pickle, and gives what it made.
    fn run(&mut self) -> Result<Id, String> {
        loop {
            let [opcode] = self.array()?;
            match opcode {
                // PROTO, FRAME
                0x80 => self.skip(1)?,
                0x95 => self.skip(8)?,
                // STOP
                b'.' => return self.pop(),

                // NONE, NEWTRUE, NEWFALSE
                b'N' | 0x88 | 0x89 => self.stack.push(PLAIN),
                // BINFLOAT, SHORT_BINBYTES, BINBYTES, BINBYTES8, BYTEARRAY8
                b'G' => self.plain(8)?,
                b'C' => self.length::<1>().and_then(|length| self.plain(length))?,
                b'B' => self.length::<4>().and_then(|length| self.plain(length))?,
                0x8e | 0x96 => self.length::<8>().and_then(|length| self.plain(length))?,
                // BININT, BININT1, BININT2, LONG1, LONG4
                b'J' => {
                    let int = i32::from_le_bytes(self.array()?);
                    self.push(Value::Int(int.into()));
                }
                b'K' => {
                    let [int] = self.array()?;
                    self.push(Value::Int(int.into()));
                }
                b'M' => {
                    let int = u16::from_le_bytes(self.array()?);
                    self.push(Value::Int(int.into()));
                }
                0x8a => self.length::<1>().and_then(|length| self.long(length))?,
                0x8b => self.length::<4>().and_then(|length| self.long(length))?,
                // SHORT_BINUNICODE, BINUNICODE, BINUNICODE8
                0x8c => self.length::<1>().and_then(|length| self.text(length))?,
                b'X' => self.length::<4>().and_then(|length| self.text(length))?,
                0x8d => self.length::<8>().and_then(|length| self.text(length))?,

                // EMPTY_TUPLE, EMPTY_LIST, EMPTY_SET, EMPTY_DICT
                b')' | b']' | 0x8f => self.push(Value::Sequence(Vec::new())),
                b'}' => self.push(Value::Dict(Vec::new())),
                // TUPLE1, TUPLE2, TUPLE3
                0x85..=0x87 => {
                    let items = self.take(usize::from(opcode) - 0x84)?;
                    self.push(Value::Sequence(items));
                }
                // MARK, POP_MARK, TUPLE, FROZENSET
                b'(' => self.marks.push(self.stack.len()),
                b'1' => drop(self.take_to_mark()?),
                b't' | 0x91 => {
                    let items = self.take_to_mark()?;
                    self.push(Value::Sequence(items));
                }
                // APPEND, APPENDS, ADDITEMS
                b'a' => self.take(1).and_then(|items| self.extend(&items))?,
                b'e' | 0x90 => self.take_to_mark().and_then(|items| self.extend(&items))?,
                // SETITEM, SETITEMS
                b's' => self.take(2).and_then(|items| self.set_items(&items))?,
                b'u' => self.take_to_mark().and_then(|items| self.set_items(&items))?,
                // POP
                b'0' => drop(self.pop()?),

                // BINGET, LONG_BINGET
                b'h' => {
                    let [place] = self.array()?;
                    self.get(place.into())?;
                }
                b'j' => {
                    let place = u32::from_le_bytes(self.array()?);
                    self.get(place)?;
                }
                // BINPUT, LONG_BINPUT, MEMOIZE
                b'q' => {
                    let [place] = self.array()?;
                    self.put(place.into())?;
                }
                b'r' => {
                    let place = u32::from_le_bytes(self.array()?);
                    self.put(place)?;
                }
                0x94 => self.put(u32::try_from(self.memo.len()).map_err(|_| "is too long")?)?,

                // GLOBAL, STACK_GLOBAL
                b'c' => {
                    let global = Value::Global(self.line()?, self.line()?);
                    self.push(global);
                }
                0x93 => {
                    let [module, name] = self.pop_array()?;
                    let (&Value::Text(module), &Value::Text(name)) = (&self.values[module], &self.values[name]) else {
                        return Err("names a class by what is no text".to_owned());
                    };
                    self.push(Value::Global(module, name));
                }
                // BINPERSID, REDUCE
                b'Q' => {
                    let id = self.pop()?;
                    let storage = self.storage(id)?;
                    self.push(Value::Storage(storage));
                }
                b'R' => {
                    let [function, arguments] = self.pop_array()?;
                    let made = self.call(function, arguments)?;
                    self.stack.push(made);
                }
                // NEWOBJ, NEWOBJ_EX
                0x81 => {
                    let [class, _] = self.pop_array()?;
                    self.push_object(class);
                }
                0x92 => {
                    let [class, _, _] = self.pop_array()?;
                    self.push_object(class);
                }
                // BUILD: attributes of an object, as OrderedDict's `_metadata` in a state dict.
                b'b' => drop(self.pop()?),

                _ => {
                    return Err(format!(
                        "has an opcode '{}' that torch.save does not write",
                        opcode.escape_ascii()
                    ));
                }
            }
        }
    }

    // What the pickle spells

    fn bytes(&mut self, count: usize) -> Result<&'a [u8], String> {
        let (bytes, rest) = self.rest.split_at_checked(count).ok_or("is truncated")?;
        self.rest = rest;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let (bytes, rest) = self.rest.split_first_chunk().ok_or("is truncated")?;
        self.rest = rest;
        Ok(*bytes)
    }

    /// An unsigned little-endian number of `N` bytes, at most eight.
    fn length<const N: usize>(&mut self) -> Result<usize, String> {
        let mut bytes = [0; 8];
        bytes[..N].copy_from_slice(&self.array::<N>()?);
        usize::try_from(u64::from_le_bytes(bytes)).map_err(|_| "is truncated".to_owned())
    }

    fn skip(&mut self, count: usize) -> Result<(), String> {
        self.bytes(count).map(drop)
    }

    fn utf8(bytes: &'a [u8]) -> Result<&'a str, String> {
        str::from_utf8(bytes).map_err(|_| "has text that is not UTF-8".to_owned())
    }

    fn line(&mut self) -> Result<&'a str, String> {
        let end = self.rest.iter().position(|&byte| byte == b'\n').ok_or("is truncated")?;
        let line = self.bytes(end)?;
        self.skip(1)?;
        Self::utf8(line)
    }

    fn plain(&mut self, length: usize) -> Result<(), String> {
        self.skip(length)?;
        self.stack.push(PLAIN);
        Ok(())
    }

    fn text(&mut self, length: usize) -> Result<(), String> {
        let text = Self::utf8(self.bytes(length)?)?;
        self.push(Value::Text(text));
        Ok(())
    }

    /// Two's complement, little-endian. No size or offset is beyond 64 bits.
    fn long(&mut self, length: usize) -> Result<(), String> {
        let bytes = self.bytes(length)?;
        let fill = if bytes.last().is_some_and(|&byte| byte >= 0x80) {
            0xff
        } else {
            0
        };
        let mut long = [fill; 8];
        match long.get_mut(..length) {
            Some(low) => {
                low.copy_from_slice(bytes);
                self.push(Value::Int(i64::from_le_bytes(long)));
            }
            None => self.stack.push(PLAIN),
        }
        Ok(())
    }

    // The stack

    fn push(&mut self, value: Value<'a>) {
        self.stack.push(self.values.len());
        self.values.push(value);
    }

    /// The last `count` values, none of them below the last mark.
    fn take(&mut self, count: usize) -> Result<Vec<Id>, String> {
        let floor = self.marks.last().copied().unwrap_or(0);
        let start = self.stack.len().checked_sub(count).filter(|&start| start >= floor);
        Ok(self.stack.split_off(start.ok_or("takes more values than there are")?))
    }

    fn take_to_mark(&mut self) -> Result<Vec<Id>, String> {
        let mark = self.marks.pop().ok_or("lacks a mark")?;
        Ok(self.stack.split_off(mark))
    }

    fn pop_array<const N: usize>(&mut self) -> Result<[Id; N], String> {
        let taken = self.take(N)?;
        taken
            .try_into()
            .map_err(|_| "takes more values than there are".to_owned())
    }

    fn pop(&mut self) -> Result<Id, String> {
        self.pop_array().map(|[id]| id)
    }

    fn top(&self) -> Result<Id, String> {
        let floor = self.marks.last().copied().unwrap_or(0);
        let above = self.stack.get(floor..).unwrap_or_default();
        above
            .last()
            .copied()
            .ok_or_else(|| "takes more values than there are".to_owned())
    }

    fn get(&mut self, place: u32) -> Result<(), String> {
        let id = self
            .memo
            .get(&place)
            .ok_or_else(|| format!("recalls {place}, which it never kept"))?;
        self.stack.push(*id);
        Ok(())
    }

    fn put(&mut self, place: u32) -> Result<(), String> {
        let top = self.top()?;
        self.memo.insert(place, top);
        Ok(())
    }

    // Containers. An object may have items too, as a subclass of list or dict; it stays an object.

    fn extend(&mut self, items: &[Id]) -> Result<(), String> {
        let top = self.top()?;
        match &mut self.values[top] {
            Value::Sequence(list) => list.extend(items),
            Value::Object(..) => {}
            _ => return Err("appends to what is no list".to_owned()),
        }
        Ok(())
    }

    fn set_items(&mut self, items: &[Id]) -> Result<(), String> {
        let top = self.top()?;
        let (pairs, []) = items.as_chunks::<2>() else {
            return Err("has a key without a value".to_owned());
        };
        match &mut self.values[top] {
            Value::Dict(dict) => dict.extend(pairs.iter().map(|&[key, value]| (key, value))),
            Value::Object(..) => {}
            _ => return Err("sets items of what is no dict".to_owned()),
        }
        Ok(())
    }

    // What calls make

    fn call(&mut self, function: Id, arguments: Id) -> Result<Id, String> {
        let made = match self.values[function] {
            Value::Global("torch._utils", "_rebuild_tensor_v2") => Value::Tensor(Rc::new(self.tensor(arguments)?)),
            // The parameter is its data.
            Value::Global("torch._utils", "_rebuild_parameter") => match *self.sequence(arguments)? {
                [data, ..] => return Ok(data),
                [] => return Err("has a parameter without data".to_owned()),
            },
            Value::Global("collections", "OrderedDict") if self.sequence(arguments)?.is_empty() => {
                Value::Dict(Vec::new())
            }
            Value::Global(module, name) => Value::Object(module, name),
            _ => return Ok(PLAIN),
        };
        self.values.push(made);
        Ok(self.values.len() - 1)
    }

    fn push_object(&mut self, class: Id) {
        match self.values[class] {
            Value::Global(module, name) => self.push(Value::Object(module, name)),
            _ => self.stack.push(PLAIN),
        }
    }

    fn sequence(&self, id: Id) -> Result<&[Id], String> {
        match &self.values[id] {
            Value::Sequence(items) => Ok(items),
            _ => Err("has something else where a tuple should be".to_owned()),
        }
    }

    fn size(&self, id: Id) -> Result<usize, String> {
        match self.values[id] {
            Value::Int(size) if let Ok(size) = usize::try_from(size) => Ok(size),
            _ => Err("has something else where a size should be".to_owned()),
        }
    }

    /// A copy for every tensor, so there must be few.
    fn sizes(&self, id: Id) -> Result<Vec<usize>, String> {
        let sizes = self.sequence(id)?;
        if sizes.len() > MAX_DIMENSIONS {
            let found = sizes.len();
            return Err(format!(
                "has a tensor of {found} dimensions, at most {MAX_DIMENSIONS} are supported"
            ));
        }
        sizes.iter().map(|&size| self.size(size)).collect()
    }

    /// `('storage', class, key, location, elements)`
    fn storage(&self, id: Id) -> Result<Storage<'a>, String> {
        if let [tag, class, key, _location, elements, ..] = *self.sequence(id)?
            && let Value::Text("storage") = self.values[tag]
            && let Value::Global("torch", class) = self.values[class]
            && let Value::Text(key) = self.values[key]
        {
            let elements = self.size(elements)?;
            return Ok(Storage { class, key, elements });
        }
        Err("refers to something else than a storage".to_owned())
    }

    /// `_rebuild_tensor_v2(storage, storage_offset, size, stride, requires_grad, backward_hooks, metadata=None)`
    fn tensor(&self, arguments: Id) -> Result<Tensor<'a>, String> {
        let [
            storage,
            offset,
            shape,
            strides,
            _requires_grad,
            _hooks,
            ref metadata @ ..,
        ] = *self.sequence(arguments)?
        else {
            return Err("makes a tensor of too few arguments".to_owned());
        };
        // Such as {'neg': True}: the values are not those of the storage.
        for &metadata in metadata {
            match &self.values[metadata] {
                Value::Plain => {}
                Value::Dict(items) if items.is_empty() => {}
                _ => return Err("has a tensor with metadata; save a clone of it".to_owned()),
            }
        }
        let Value::Storage(storage) = self.values[storage] else {
            return Err("makes a tensor without a storage".to_owned());
        };
        let shape = self.sizes(shape)?;
        let mut strides = self.sizes(strides)?;
        if strides.len() != shape.len() {
            return Err(format!(
                "has a tensor of shape {shape:?} with {} strides",
                strides.len()
            ));
        }
        // A dimension of one is never stepped along, and its stride may be anything.
        let pairs = strides.iter_mut().zip(&shape);
        pairs
            .filter(|(_, size)| **size <= 1)
            .for_each(|(stride, _)| *stride = 0);
        Ok(Tensor {
            storage,
            offset: self.size(offset)?,
            shape,
            strides,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A call of `_rebuild_tensor_v2` on six elements of storage "0", without the protocol and the end.
    const TENSOR: &[u8] = b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\n\
        X\x01\0\0\x000X\x03\0\0\0cpuK\x06tQK\0K\x02K\x03\x86K\x03K\x01\x86\x89}tR";

    fn pickle(parts: &[&[u8]]) -> Vec<u8> {
        [b"\x80\x02", parts.concat().as_slice(), b"."].concat()
    }

    fn error(pickle: &[u8]) -> String {
        read(pickle).expect_err("an error")
    }

    #[test]
    fn a_tensor_is_understood() {
        let bytes = pickle(&[TENSOR]);
        let Saved::Tensor(tensor) = read(&bytes).unwrap() else {
            panic!("a tensor")
        };
        let storage = Storage {
            class: "FloatStorage",
            key: "0",
            elements: 6,
        };
        let expected = Tensor {
            storage,
            offset: 0,
            shape: vec![2, 3],
            strides: vec![3, 1],
        };
        assert_eq!(*tensor, expected);
    }

    #[test]
    fn of_a_dict_only_tensors_with_a_name_are_kept() {
        // {"a": tensor, "b": 1, 2: tensor}, where the second tensor is recalled.
        let bytes = pickle(&[b"}(X\x01\0\0\0a", TENSOR, b"q\x05X\x01\0\0\0bK\x01K\x02h\x05u"]);
        let Saved::Dict(tensors) = read(&bytes).unwrap() else {
            panic!("a dict")
        };
        assert_eq!(tensors.keys().collect::<Vec<_>>(), [&"a"]);
    }

    #[test]
    fn functions_are_named_and_not_called() {
        let bytes = pickle(&[b"cos\nsystem\nX\x04\0\0\0true\x85R"]);
        assert_eq!(
            error(&bytes),
            "holds an object of os.system; save a tensor, or a dict with tensors"
        );
        // What wraps a tensor may change its values.
        let bytes = pickle(&[b"cmy.module\nscale\n", TENSOR, b"\x85R"]);
        assert!(error(&bytes).contains("an object of my.module.scale"));
        let bytes = pickle(&[b"}X\x01\0\0\0acmy.module\nscale\n", TENSOR, b"\x85Rs"]);
        assert!(matches!(read(&bytes).unwrap(), Saved::Dict(tensors) if tensors.is_empty()));
    }

    #[test]
    fn what_is_no_tensor_is_named() {
        for (bytes, expected) in [
            (&b"]"[..], "holds a list"),
            (b"N", "holds no tensor"),
            (b"K\x01", "holds no tensor"),
            (b"X\x01\0\0\0a", "holds no tensor"),
        ] {
            assert!(error(&pickle(&[bytes])).starts_with(expected));
        }
    }

    #[test]
    fn metadata_that_changes_values_is_refused() {
        let end = TENSOR.len() - 2;
        // The same call with a seventh argument: None, {}, {'neg': True}.
        let with = |metadata: &[u8]| pickle(&[&TENSOR[..end], metadata, b"tR"]);
        assert!(read(&with(b"N")).is_ok());
        assert!(read(&with(b"}")).is_ok());
        assert!(error(&with(b"}X\x03\0\0\0neg\x88s")).contains("metadata"));
    }

    #[test]
    fn sizes_that_are_none_are_refused() {
        let replaced = |from: &[u8], to: &[u8]| {
            let at = TENSOR.windows(from.len()).position(|w| w == from).unwrap();
            let bytes = pickle(&[&TENSOR[..at], to, &TENSOR[at + from.len()..]]);
            read(&bytes).map(drop)
        };
        // The shape (2, 3): as it is, negative, a float, as 2**64, three dimensions, no tuple, nine dimensions.
        let shape = b"K\x02K\x03\x86";
        assert_eq!(replaced(shape, shape), Ok(()));
        for other in [
            &b"K\x02J\xff\xff\xff\xff\x86"[..],
            b"K\x02G\0\0\0\0\0\0\0\0\x86",
            b"K\x02\x8a\x09\0\0\0\0\0\0\0\0\x01\x86",
            b"K\x02K\x03K\x01\x87",
            b"K\x02",
            b"(K\x01K\x01K\x01K\x01K\x01K\x01K\x01K\x01K\x01t",
        ] {
            assert!(replaced(shape, other).is_err(), "{}", other.escape_ascii());
        }
        // LONG1 of no bytes is zero, of one byte -1.
        assert_eq!(replaced(b"QK\0", b"Q\x8a\0"), Ok(()));
        assert!(replaced(b"QK\0", b"Q\x8a\x01\xff").is_err());
    }

    #[test]
    fn a_pickle_cut_anywhere_is_refused() {
        let bytes = pickle(&[b"}(X\x01\0\0\0a", TENSOR, b"u"]);
        for end in 0..bytes.len() {
            assert!(read(&bytes[..end]).is_err(), "cut at {end}");
        }
    }

    #[test]
    fn a_stack_that_runs_empty_is_an_error() {
        for bytes in [
            &b""[..],
            b"0",
            b"1",
            b"a",
            b"e",
            b"s",
            b"u",
            b"t",
            b"\x85",
            b"]\x86",
            b"(\x85",
            b"]q\0(q\x01",
            b"](a",
            b"R",
            b"Q",
            b"b",
            b"\x81",
            b"\x92",
            b"\x93",
            b"h\x01",
            b"j\x01\0\0\0",
            b"q\0",
            b"\x94",
            b"](",
            b"}]\x90",
            b"}(]u",
        ] {
            assert!(read(&pickle(&[bytes])).is_err(), "{}", bytes.escape_ascii());
        }
    }

    #[test]
    fn lengths_that_lie_are_refused() {
        for bytes in [
            &b"X\xff\xff\xff\xffa"[..],
            b"\x8d\xff\xff\xff\xff\xff\xff\xff\xffa",
            b"B\xff\xff\xff\xff",
            b"\x8b\xff\xff\xff\xff",
        ] {
            assert_eq!(error(&pickle(&[bytes])), "is truncated");
        }
        assert!(error(&pickle(&[b"X\x01\0\0\0\xff"])).contains("UTF-8"));
        assert!(error(b"\x80\x02I1\n.").contains("opcode 'I'"));
    }

    #[test]
    fn a_pickle_that_repeats_itself_builds_no_more_than_it_spells() {
        // Each step makes a tuple of twice the last one: 2^60 values if they were copies.
        let mut bytes = b"\x80\x02]q\0".to_vec();
        for _ in 0..60 {
            bytes.extend(b"h\0h\0\x86q\0");
        }
        bytes.push(b'.');
        assert!(error(&bytes).starts_with("holds a list"));
        // A list in itself, and nesting that would overflow a stack that follows it.
        assert!(error(&pickle(&[b"]q\0h\0a"])).starts_with("holds a list"));
        assert!(error(&pickle(&[b"]", &[0x85; 1 << 16]])).starts_with("holds a list"));
    }
}

//! Where bands are while nothing computes with them.

use std::{
    fs::File,
    io::{Read, Seek, SeekFrom, Write},
    str::FromStr,
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread::JoinHandle,
};

use burn::tensor::{DType, Device, Shape, Tensor, TensorData, bf16, f16};
use half::slice::HalfFloatSliceExt;
use memmap2::MmapMut;
use rayon::prelude::*;
use vae_ops::support::{DeviceProfile, Runtime, device_name};

use crate::{Error, Result};

use super::{bands::Place, operations::Operations};

/// Where the bands of a tiled decode are while nothing computes with them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Storage {
    /// In the memory of the device.
    #[default]
    Device,
    /// In the memory of the host, which on the CPU is the device's. From and to a GPU, bands move while others are computed.
    Host,
    /// In the memory of the host with 16 bits: f32 is rounded to f16, scaled by a power of two for each band. Exact for models in
    /// f16 and bf16.
    Half,
    /// In a temporary file, which is gone when the decode ends.
    Disk,
}

impl Storage {
    /// All of them, the fastest first.
    pub const ALL: [Self; 4] = [Self::Device, Self::Host, Self::Half, Self::Disk];

    /// The name used on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Host => "host",
            Self::Half => "half",
            Self::Disk => "disk",
        }
    }
}

impl std::fmt::Display for Storage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Storage {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let mut all = Self::ALL.into_iter();
        all.find(|storage| storage.name() == name)
            .ok_or_else(|| format!("`{name}` is not a storage, use device, host, half or disk"))
    }
}

/// Bands that wait for the mover, and the one that it moves: what a GPU holds beyond what computes.
pub(crate) const BANDS_IN_FLIGHT: usize = 2;

/// Moves bands away and back.
pub(crate) struct Store {
    storage: Storage,
    device: Device,
    /// Of [`Storage::Disk`].
    file: Option<Arc<ScratchFile>>,
    /// A GPU computes on while it moves bands. On the CPU the cores that would move them are those that compute.
    mover: Option<Mover>,
}

/// A band that is not on the device, or on its way.
pub(crate) enum Away {
    /// On its way, or there.
    Leaving(Receiver<Result<Kept>>),
    /// On its way back.
    Returning(Receiver<Result<Tensor<4>>>),
}

/// A band off the device.
pub(crate) enum Kept {
    Host(TensorData),
    Half {
        /// f16, in a mapping of their own: bands of many sizes come and go, and a heap would keep the gaps between them.
        values: MmapMut,
        /// What they were multiplied with.
        scale: f32,
        shape: Shape,
    },
    Disk {
        block: Block,
        shape: Shape,
        dtype: DType,
    },
}

impl Store {
    /// # Errors
    /// [`Error::Io`] when there is no temporary file.
    pub fn new(storage: Storage, device: &Device) -> Result<Self> {
        let is_gpu = matches!(DeviceProfile::of(device).runtime, Runtime::Gpu(_));
        let storage = match storage {
            Storage::Host if !is_gpu => Storage::Device,
            storage => storage,
        };
        let file = match storage {
            Storage::Disk => Some(Arc::new(ScratchFile::new()?)),
            _ => None,
        };
        let mover = (is_gpu && storage != Storage::Device).then(Mover::new).transpose()?;
        Ok(Self {
            storage,
            device: device.clone(),
            file,
            mover,
        })
    }

    pub fn send_away<O>(&self, x: Tensor<4>) -> Result<Place<O>>
    where
        O: Operations<Tensor = Tensor<4>, Away = Away>,
    {
        if self.storage == Storage::Device {
            return Ok(Place::Here(x));
        }
        let is_half = self.storage == Storage::Half;
        let file = self.file.clone();
        let keep = move || {
            let device = x.device();
            let data = x.try_into_data().map_err(failed(&device))?;
            let (shape, dtype) = (data.shape().clone(), data.dtype());
            match file {
                Some(file) => Ok(Kept::Disk {
                    block: Block::write(file, data.as_bytes())?,
                    shape,
                    dtype,
                }),
                None if is_half && dtype == DType::F32 => {
                    let data = data.as_slice::<f32>().map_err(failed(&device))?;
                    let mut values = MmapMut::map_anon(data.len() * size_of::<f16>()).map_err(failed(&device))?;
                    let scale = to_half(data, bytemuck::cast_slice_mut(&mut values));
                    Ok(Kept::Half { values, scale, shape })
                }
                None => Ok(Kept::Host(data)),
            }
        };
        Ok(Place::Away(Away::Leaving(self.start(keep)?)))
    }

    /// Does nothing where a band would only come back earlier, and not while others are computed.
    pub fn call_back(&self, away: Away) -> Result<Away> {
        match (&self.mover, away) {
            (Some(_), Away::Leaving(kept)) => Ok(Away::Returning(self.start(self.bring(kept))?)),
            (_, away) => Ok(away),
        }
    }

    pub fn take_back(&self, away: Away) -> Result<Tensor<4>> {
        match away {
            Away::Leaving(kept) => self.bring(kept)(),
            Away::Returning(tensor) => received(&tensor),
        }
    }

    fn bring(&self, kept: Receiver<Result<Kept>>) -> impl FnOnce() -> Result<Tensor<4>> + Send + 'static {
        let device = self.device.clone();
        // The mover works in order: when it comes to this, the band is there.
        move || received(&kept)?.into_tensor(&device)
    }

    /// Runs a job on the mover, or now where there is none.
    fn start<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<Receiver<Result<T>>> {
        let (sender, receiver) = sync_channel(1);
        let job = move || {
            // Whoever waited may have ended for another reason.
            let _ = sender.send(job());
        };
        match &self.mover {
            Some(mover) => mover.send(Box::new(job))?,
            None => job(),
        }
        Ok(receiver)
    }
}

impl Kept {
    fn into_tensor(self, device: &Device) -> Result<Tensor<4>> {
        let data = match self {
            Self::Host(data) => data,
            Self::Half { values, scale, shape } => {
                TensorData::new(from_half(bytemuck::cast_slice(&values), scale), shape)
            }
            Self::Disk { block, shape, dtype } => match dtype {
                DType::F16 => TensorData::new(block.read::<f16>()?, shape),
                DType::BF16 => TensorData::new(block.read::<bf16>()?, shape),
                _ => TensorData::new(block.read::<f32>()?, shape),
            },
        };
        let dtype = data.dtype();
        Ok(Tensor::from_data(data, (device, dtype)))
    }
}

fn failed<E: std::fmt::Display>(device: &Device) -> impl FnOnce(E) -> Error {
    let device = device_name(device);
    move |error| Error::DeviceFailed {
        device,
        reason: error.to_string(),
    }
}

/// What a job gives when it is done.
fn received<T>(receiver: &Receiver<Result<T>>) -> Result<T> {
    receiver.recv().unwrap_or_else(|_| Err(mover_ended()))
}

fn mover_ended() -> Error {
    Error::DeviceFailed {
        device: "host".to_string(),
        reason: "the thread that moves bands ended early".to_string(),
    }
}

/// A thread that reads and writes device memory while the decode goes on.
struct Mover {
    jobs: Option<SyncSender<Job>>,
    thread: Option<JoinHandle<()>>,
}

type Job = Box<dyn FnOnce() + Send>;

impl Mover {
    fn new() -> Result<Self> {
        // Bounded, so that no more bands wait on the device than are accounted for.
        let (jobs, queue) = sync_channel::<Job>(BANDS_IN_FLIGHT - 1);
        let thread = std::thread::Builder::new()
            .name("vae-bands".to_string())
            .spawn(move || queue.into_iter().for_each(|job| job()))
            .map_err(|error| Error::DeviceFailed {
                device: "host".to_string(),
                reason: format!("no thread to move bands: {error}"),
            })?;
        Ok(Self {
            jobs: Some(jobs),
            thread: Some(thread),
        })
    }

    fn send(&self, job: Job) -> Result<()> {
        let jobs = self.jobs.as_ref().ok_or_else(mover_ended)?;
        jobs.send(job).map_err(|_| mover_ended())
    }
}

impl Drop for Mover {
    fn drop(&mut self) {
        // The queue ends when its sender does.
        self.jobs.take();
        if let Some(thread) = self.thread.take() {
            // A panic there was an error where its result was missed.
            let _ = thread.join();
        }
    }
}

/// Elements that a thread converts at a time.
const CHUNK: usize = 1 << 14;

/// Writes values times a power of two that brings the largest to half of f16's range, and gives that power.
///
/// With values that are not finite it is 1: they stay so.
fn to_half(values: &[f32], half: &mut [f16]) -> f32 {
    let largest = |values: &[f32]| {
        values
            .iter()
            .fold(0u32, |largest, value| largest.max(value.abs().to_bits()))
    };
    // Bits of positive floats are in the order of the floats, those that are not finite last.
    let largest = values.par_chunks(CHUNK).map(largest).max().unwrap_or(0);
    let scale = match f32::from_bits(largest) {
        largest if largest.is_finite() && largest > 0.0 => {
            let exponent = (largest.to_bits() >> 23) as i32 - 127;
            2f32.powi((14 - exponent).clamp(-126, 126))
        }
        _ => 1.0,
    };
    half.par_chunks_mut(CHUNK)
        .zip(values.par_chunks(CHUNK))
        .for_each(|(half, values)| {
            let scaled: Vec<f32> = values.iter().map(|value| value * scale).collect();
            half.convert_from_f32_slice(&scaled);
        });
    scale
}

fn from_half(half: &[f16], scale: f32) -> Vec<f32> {
    let mut values = vec![0.0; half.len()];
    let inverse = scale.recip();
    values
        .par_chunks_mut(CHUNK)
        .zip(half.par_chunks(CHUNK))
        .for_each(|(values, half)| {
            half.convert_to_f32_slice(values);
            values.iter_mut().for_each(|value| *value *= inverse);
        });
    values
}

/// A temporary file without a name. Written and read, not mapped: a full disk is an error then, and no signal.
pub(crate) struct ScratchFile {
    inner: Mutex<Scratch>,
}

struct Scratch {
    file: File,
    end: u64,
    /// Offset and length of what was freed. Bands of a resolution are of one size, so blocks are reused whole.
    free: Vec<(u64, usize)>,
}

impl ScratchFile {
    fn new() -> Result<Self> {
        let file = tempfile::tempfile().map_err(Error::io("create a file in", &std::env::temp_dir()))?;
        let inner = Scratch {
            file,
            end: 0,
            free: Vec::new(),
        };
        Ok(Self {
            inner: Mutex::new(inner),
        })
    }

    fn with<T>(&self, action: &'static str, run: impl FnOnce(&mut Scratch) -> std::io::Result<T>) -> Result<T> {
        // Nothing is left half-changed where a holder could panic.
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        run(&mut inner).map_err(Error::io(action, &std::env::temp_dir()))
    }
}

/// Some bytes of the file, free again when it is dropped.
pub(crate) struct Block {
    file: Arc<ScratchFile>,
    offset: u64,
    len: usize,
}

impl Block {
    fn write(file: Arc<ScratchFile>, bytes: &[u8]) -> Result<Self> {
        let len = bytes.len();
        let offset = file.with("write a temporary file in", |scratch| {
            let fits = scratch.free.iter().position(|&(_, free)| free == len);
            let offset = match fits {
                Some(index) => scratch.free.swap_remove(index).0,
                None => scratch.end,
            };
            scratch.file.seek(SeekFrom::Start(offset))?;
            scratch.file.write_all(bytes)?;
            scratch.end = scratch.end.max(offset + len as u64);
            Ok(offset)
        })?;
        Ok(Self { file, offset, len })
    }

    fn read<E: bytemuck::Pod>(&self) -> Result<Vec<E>> {
        let mut values = bytemuck::zeroed_vec::<E>(self.len / size_of::<E>());
        self.file.with("read a temporary file in", |scratch| {
            scratch.file.seek(SeekFrom::Start(self.offset))?;
            scratch.file.read_exact(bytemuck::cast_slice_mut(&mut values))
        })?;
        Ok(values)
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let mut inner = self.file.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.free.push((self.offset, self.len));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn there_and_back(values: &[f32]) -> Vec<f32> {
        let mut half = vec![f16::ZERO; values.len()];
        let scale = to_half(values, &mut half);
        from_half(&half, scale)
    }

    #[test]
    fn half_precision_keeps_eleven_bits_of_any_magnitude() {
        for magnitude in [1e-30f32, 1e-3, 1.0, 7e4, 1e30] {
            let values: Vec<f32> = (0..40_000)
                .map(|i| ((i * 37 % 2003) as f32 / 1001.5 - 1.0) * magnitude)
                .collect();
            let bound = magnitude * 2f32.powi(-11);
            for (found, expected) in there_and_back(&values).iter().zip(&values) {
                assert!((found - expected).abs() <= bound, "{found} is not {expected}");
            }
        }
        assert_eq!(there_and_back(&[0.0; 3]), [0.0; 3]);
    }

    #[test]
    fn half_precision_hides_no_value_that_is_not_finite() {
        let values = there_and_back(&[1.0, f32::NAN, f32::NEG_INFINITY, 2.0]);
        assert!(values[1].is_nan() && values[2] == f32::NEG_INFINITY);
        assert_eq!([values[0], values[3]], [1.0, 2.0]);
    }

    #[test]
    fn blocks_of_a_file_keep_their_bytes_and_are_reused() {
        let file = Arc::new(ScratchFile::new().unwrap());
        let block =
            |value: f32, count: usize| Block::write(file.clone(), bytemuck::cast_slice(&vec![value; count])).unwrap();
        let (first, second) = (block(1.0, 10), block(2.0, 20));
        drop(first);
        let (third, fourth) = (block(3.0, 10), block(4.0, 10));
        assert_eq!(second.read::<f32>().unwrap(), [2.0; 20]);
        assert_eq!(third.read::<f32>().unwrap(), [3.0; 10]);
        assert_eq!(fourth.read::<f32>().unwrap(), [4.0; 10]);
        assert_eq!([third.offset, fourth.offset], [0, 120]);
    }
}

//! Which images go to the device together, and in which order.

use std::{collections::HashMap, num::NonZeroUsize};

use burn_vae::{DeviceName, LatentSpace, Quality};
use vae_io::{LatentLayout, LatentsReading};

use crate::args::BatchSize;

/// An image to decode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageId {
    /// The output it goes to, counted over the run.
    pub output: usize,
    /// Its place in the batch of its file.
    pub index: usize,
}

/// What images of one device batch have in common. The type that they are stored in is not part of it: latents are widened
/// to f32, which is exact.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Shape {
    layout: LatentLayout,
    channels: usize,
    rows: usize,
    columns: usize,
    space: LatentSpace,
}

impl Shape {
    fn of(reading: &LatentsReading) -> Self {
        Self {
            layout: reading.layout,
            channels: reading.channels,
            rows: reading.rows,
            columns: reading.columns,
            space: reading.space,
        }
    }
}

/// Device batches of at most `limit` images each, in the order of their first images; `limit` depends on nothing but the
/// shape. With a limit of one that is the order of the images.
pub fn schedule<'a>(
    images: impl IntoIterator<Item = (ImageId, &'a LatentsReading)>,
    limit: impl Fn(&LatentsReading) -> usize,
) -> Vec<Vec<ImageId>> {
    let mut batches: Vec<Vec<ImageId>> = Vec::new();
    let mut open: HashMap<Shape, usize> = HashMap::new();
    for (image, reading) in images {
        let shape = Shape::of(reading);
        match open.get(&shape) {
            Some(&batch) if batches[batch].len() < limit(reading) => batches[batch].push(image),
            _ => {
                open.insert(shape, batches.len());
                batches.push(vec![image]);
            }
        }
    }
    batches
}

/// Images that a device batch of such latents may have, for what `--batch` says.
pub fn batch_limit(asked: Option<BatchSize>, quality: Quality, device: DeviceName, reading: &LatentsReading) -> usize {
    match (asked, quality) {
        (Some(BatchSize::Images(images)), _) => images.get(),
        (None, Quality::Lossless) => 1,
        (None, Quality::High) | (Some(BatchSize::Auto), _) => auto_batch(device, reading.width, reading.height),
    }
}

/// What `--batch auto` means for images of this size.
///
/// A CPU is busy with one image, and every further one costs memory. A GPU is idle for part of the decode of a small image;
/// from about 1024x1024 on it is not, and a batch with no more pixels than that takes no more memory than such an image.
fn auto_batch(device: DeviceName, width: usize, height: usize) -> usize {
    const PIXELS: usize = 1024 * 1024;
    const IMAGES: usize = 16;
    match device {
        DeviceName::Cpu => 1,
        DeviceName::Auto | DeviceName::Cuda(_) | DeviceName::Wgpu(_) => {
            let pixels = width.saturating_mul(height).max(1);
            (PIXELS / pixels).clamp(1, IMAGES)
        }
    }
}

/// Threads that read images back and write them, when a device batch has at most this many bytes of pixels.
///
/// A CPU needs one, so that it need not wait for a PNG. A GPU decodes faster than one core encodes. Each thread holds one
/// batch, and all together no more than a gibibyte, unless one batch has more.
pub fn writers(device: DeviceName, batch_bytes: usize) -> usize {
    const WRITERS: usize = 8;
    const BYTES: usize = 1 << 30;
    let cores = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    match device {
        DeviceName::Cpu => 1,
        DeviceName::Auto | DeviceName::Cuda(_) | DeviceName::Wgpu(_) => {
            (BYTES / batch_bytes.max(1)).clamp(1, WRITERS.min(cores))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(rows: usize, columns: usize) -> LatentsReading {
        LatentsReading {
            layout: LatentLayout::Map,
            space: LatentSpace::Diffusion,
            batch: 1,
            channels: 4,
            rows,
            columns,
            patched: false,
            height: 8 * rows,
            width: 8 * columns,
            unbatched: false,
            batch_norm: false,
            assumed_square: false,
        }
    }

    /// The outputs in each batch, for images of these shapes.
    fn scheduled(readings: &[LatentsReading], limit: usize) -> Vec<Vec<usize>> {
        let images = readings.iter().enumerate();
        let images = images.map(|(output, reading)| (ImageId { output, index: 0 }, reading));
        let batches = schedule(images, |_| limit);
        let outputs = |batch: Vec<ImageId>| batch.iter().map(|image| image.output).collect();
        batches.into_iter().map(outputs).collect()
    }

    #[test]
    fn images_of_one_shape_fill_batches_in_the_order_of_the_first() {
        let (a, b) = (map(2, 3), map(3, 2));
        let mixed = [a, b, a, a, b, a];
        assert_eq!(scheduled(&mixed, 1), [[0], [1], [2], [3], [4], [5]]);
        assert_eq!(scheduled(&mixed, 3), [vec![0, 2, 3], vec![1, 4], vec![5]]);
        assert_eq!(scheduled(&mixed, 9), [vec![0, 2, 3, 5], vec![1, 4]]);
    }

    #[test]
    fn latents_that_mean_something_else_are_not_put_together() {
        let a = map(2, 3);
        let vae = LatentsReading {
            space: LatentSpace::Vae,
            ..a
        };
        let tokens = LatentsReading {
            layout: LatentLayout::Tokens,
            ..a
        };
        assert_eq!(scheduled(&[a, vae, tokens, a], 4), [vec![0, 3], vec![1], vec![2]]);
    }

    #[test]
    fn auto_is_one_on_the_cpu_and_a_megapixel_on_gpus() {
        let limit = |asked, quality, device, rows| batch_limit(asked, quality, device, &map(rows, rows));
        let (auto, gpu) = (Some(BatchSize::Auto), DeviceName::Cuda(0));
        for (rows, images) in [(1, 16), (32, 16), (64, 4), (90, 2), (91, 1), (128, 1), (1024, 1)] {
            assert_eq!(limit(auto, Quality::Lossless, gpu, rows), images, "{rows}");
            assert_eq!(limit(None, Quality::High, gpu, rows), images, "{rows}");
            assert_eq!(limit(auto, Quality::High, DeviceName::Cpu, rows), 1);
        }
        assert_eq!(limit(None, Quality::Lossless, gpu, 1), 1);
        let three = Some(BatchSize::Images(NonZeroUsize::new(3).unwrap()));
        assert_eq!(limit(three, Quality::Lossless, DeviceName::Cpu, 1024), 3);
    }

    #[test]
    fn writers_hold_a_bounded_number_of_pixels() {
        assert_eq!(writers(DeviceName::Cpu, 1), 1);
        assert_eq!(writers(DeviceName::Cuda(0), usize::MAX), 1);
        let cores = std::thread::available_parallelism().unwrap().get();
        assert_eq!(writers(DeviceName::Cuda(0), 12 << 20), cores.min(8));
        assert_eq!(writers(DeviceName::Cuda(0), 512 << 20), cores.min(2));
    }
}

use burn::tensor::{DType, Device, Tensor, TensorData};
use vae_blocks::Latents;
use vae_io::{LatentFile, LatentLayout, LatentsReading};

/// Image `index` of a file's batch as f32 latents on `device`, in the layout and space of `reading`.
///
/// One image at a time, so that none changes another's bits.
///
/// # Panics
/// When the batch has no image `index`, or `reading` was not inferred from the shape of `file`.
pub fn latents_from_file(file: &LatentFile, reading: &LatentsReading, index: usize, device: &Device) -> Latents {
    assert!(
        index < reading.batch,
        "image {index} of a batch of {batch}",
        batch = reading.batch
    );
    let size = file.values.len() / reading.batch;
    let mut shape = reading.batched_shape();
    shape[0] = 1;
    let data = TensorData::new(file.values[index * size..][..size].to_vec(), shape);
    let options = (device, DType::F32);
    let latents = match reading.layout {
        LatentLayout::Map => Latents::diffusion(Tensor::<4>::from_data(data, options)),
        LatentLayout::Tokens => Latents::tokens(Tensor::<3>::from_data(data, options), reading.rows, reading.columns),
    };
    latents.in_space(reading.space)
}

//! The stock operations on the CPU, at sizes of the stages of a 512x512 decode that take seconds, not minutes.
//!
//! `cargo bench --workspace --features wgpu,cuda --bench vae_ops` (the features only so that nothing is built twice).

use std::{hint::black_box, time::Duration};

use burn::tensor::{Device, Distribution, Tensor};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use vae_ops::{attention, group_norm_silu, unpatchify2x2, upsample_nearest2x};

/// Channels, rows and columns: the latents' resolution, a stage in the middle, the narrow one at the end.
const ACTIVATIONS: [[usize; 3]; 3] = [[512, 64, 64], [512, 128, 128], [128, 256, 256]];

const GROUPS: usize = 32;
const EPSILON: f64 = 1e-6;

fn random<const D: usize>(shape: [usize; D]) -> Tensor<D> {
    let device = Device::flex();
    Tensor::random(shape, Distribution::Normal(0.0, 1.0), &device)
}

/// Times an operation on one activation, by its elements.
fn bench_activations(criterion: &mut Criterion, name: &str, operation: impl Fn(Tensor<4>) -> Tensor<4>) {
    let mut group = criterion.benchmark_group(name);
    for [channels, height, width] in ACTIVATIONS {
        let x = random([1, channels, height, width]);
        group.throughput(Throughput::Elements((channels * height * width) as u64));
        group.bench_function(
            BenchmarkId::from_parameter(format!("{channels}x{height}x{width}")),
            |bencher| {
                bencher.iter(|| operation(black_box(x.clone())));
            },
        );
    }
}

fn bench_group_norm_silu(criterion: &mut Criterion) {
    bench_activations(criterion, "group_norm_silu", |x| {
        let channels = x.dims()[1];
        let (weight, bias) = (
            Tensor::ones([channels], &x.device()),
            Tensor::zeros([channels], &x.device()),
        );
        group_norm_silu(x, weight, bias, GROUPS, EPSILON)
    });
}

fn bench_upsample(criterion: &mut Criterion) {
    bench_activations(criterion, "upsample_nearest2x", upsample_nearest2x);
}

fn bench_unpatchify(criterion: &mut Criterion) {
    bench_activations(criterion, "unpatchify2x2", unpatchify2x2);
}

fn bench_attention(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("attention");
    for tokens in [256, 1024, 2048] {
        let [q, k, v] = [(); 3].map(|()| random([1, tokens, 512]));
        group.throughput(Throughput::Elements((tokens * tokens) as u64));
        group.bench_function(BenchmarkId::from_parameter(format!("{tokens}x512")), |bencher| {
            bencher.iter(|| attention(black_box(q.clone()), k.clone(), v.clone()));
        });
    }
}

criterion_group! {
    name = vae_ops;
    config = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2));
    targets = bench_group_norm_silu, bench_upsample, bench_unpatchify, bench_attention
}
criterion_main!(vae_ops);

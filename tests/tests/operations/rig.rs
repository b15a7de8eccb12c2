//! A device in a type: values on it, runs of an operation, and how results are judged.

use burn::tensor::{DType, Device, Tensor, TensorData};
use integration_tests::open;
use proptest::{
    strategy::Strategy,
    test_runner::{Config, TestRunner},
};

/// A device that is there, and a type that it computes in.
pub struct Rig {
    pub device: Device,
    pub dtype: DType,
    pub gpu: bool,
    /// The kernels of sm_90a may run: shapes should be theirs, too.
    pub hopper: bool,
}

/// Values on the device, rounded to its type, and the same values in f64.
pub struct Given<const D: usize> {
    pub tensor: Tensor<D>,
    pub values: Vec<f64>,
}

impl Rig {
    /// None, with a word of why, where there is no such device or it does not compute in the type.
    pub fn open(name: &str, dtype: DType) -> Option<Self> {
        let device = open(name)?;
        if !device.supports_dtype(dtype) {
            eprintln!("skipped: {name} does not compute in {}", dtype.name());
            return None;
        }
        Some(Self {
            device,
            dtype,
            gpu: name != "cpu",
            hopper: name == "cuda" && dtype != DType::F32,
        })
    }

    /// The type has 16 bits.
    pub fn is_half(&self) -> bool {
        self.dtype != DType::F32
    }

    /// The most that rounding to the type changes a value of one.
    pub fn unit(&self) -> f64 {
        match self.dtype {
            DType::BF16 => 2f64.powi(-8),
            DType::F16 => 2f64.powi(-11),
            _ => 2f64.powi(-24),
        }
    }

    /// A bound of relative errors that is `bf16` in bf16 and less in f16, which has three bits more; none in f32.
    pub fn relative(&self, bf16: f64) -> Option<f64> {
        self.is_half().then(|| bf16 * self.unit() * 2f64.powi(8))
    }

    /// Values rounded to the type.
    pub fn rounded(&self, values: &[f64]) -> Vec<f64> {
        let data = TensorData::new(values.to_vec(), [values.len()]).convert_dtype(self.dtype);
        data.iter::<f64>().collect()
    }

    /// Puts values on the device.
    pub fn given<const D: usize>(&self, shape: [usize; D], values: Vec<f32>) -> Given<D> {
        let data = TensorData::new(values, shape).convert_dtype(self.dtype);
        Given {
            values: data.iter::<f64>().collect(),
            tensor: Tensor::from_data(data, (&self.device, self.dtype)),
        }
    }

    /// Puts random values of mean 0 and this standard deviation on the device.
    pub fn random<const D: usize>(&self, shape: [usize; D], seed: u64, deviation: f32) -> Given<D> {
        let values = random(shape.iter().product(), seed).map(|value| value * deviation);
        self.given(shape, values.collect())
    }

    /// What an operation gives: the same bits again when the memory that it is given was full of NaN, in pieces of up to
    /// its own size and up to `scratch` bytes.
    pub fn run(&self, scratch: usize, operation: impl Fn() -> Tensor<4>) -> Vec<f64> {
        let first = operation().into_data();
        self.poison(first.num_elements().max(scratch / self.dtype.size()));
        let second = operation().into_data();
        assert!(first.as_bytes() == second.as_bytes(), "two runs gave different bits");
        first.iter::<f64>().collect()
    }

    /// Leaves NaN in free memory of the device's pool: in two pieces of every size up to `elements`. Two NaN of f16 are
    /// read as 4e37 by who takes them for f32, two of bf16 as NaN.
    pub fn poison(&self, elements: usize) {
        let sizes = (6..=elements.next_power_of_two().ilog2().max(6)).rev();
        let pieces: Vec<Tensor<1>> = sizes
            .flat_map(|bits| [1usize << bits; 2])
            .map(|size| Tensor::full([size], f32::NAN, (&self.device, self.dtype)))
            .collect();
        drop(pieces);
    }

    /// Judges a result: each element by a bound of its own, and all of them by their relative L2 error.
    pub fn check(&self, found: &[f64], expected: &[f64], bound: impl Fn(usize) -> f64, relative: Option<f64>) {
        assert_eq!(found.len(), expected.len(), "number of elements");
        let (mut errors, mut squares) = (0.0, 0.0);
        for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
            let (error, bound) = ((found - expected).abs(), bound(i));
            // NaN is not within any bound.
            let within = error <= bound;
            assert!(
                within,
                "element {i} is {found}, not {expected}: off by {error:.2e}, bound {bound:.2e}"
            );
            errors += error * error;
            squares += expected * expected;
        }
        // The errors of a few elements do not average out.
        if let Some(relative) = relative.filter(|_| found.len() >= 1000) {
            let l2 = f64::sqrt(errors / squares);
            assert!(l2 <= relative, "relative L2 error {l2:.2e}, bound {relative:.2e}");
        }
    }
}

/// Values of mean 0 and variance 1, within 3.5 of 0.
pub fn random(count: usize, seed: u64) -> impl Iterator<Item = f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut uniform = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    // A sum of four uniform values has variance 1/3.
    (0..count).map(move |_| (uniform() + uniform() + uniform() + uniform()) * 3f32.sqrt())
}

/// Checks random cases, as many as `PROPTEST_CASES` says or a few, and shrinks one that fails.
pub fn for_random<S: Strategy>(few: u32, cases: S, check: impl Fn(S::Value)) {
    let mut config = Config {
        failure_persistence: None,
        max_shrink_iters: 256,
        ..Config::default()
    };
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.cases = few;
    }
    let checked = TestRunner::new(config).run(&cases, |case| {
        check(case);
        Ok(())
    });
    if let Err(error) = checked {
        panic!("{error}");
    }
}

//! How work is timed, and the check that the timer waited for the device.

use std::time::{Duration, Instant};

use burn::tensor::Tensor;

use crate::Result;

/// The same work again and again.
pub trait Work {
    /// Does it, and returns when the device has finished.
    fn run(&mut self) -> Result;

    /// Reads one value of the last result: no device can deliver it before it has computed it.
    fn read(&mut self) -> Result;
}

/// Runs that [`check`] times.
const CHECK_RUNS: usize = 5;

/// The share of a run that a device may still have to do when the timer stops.
const TOLERANCE: f64 = 0.05;

/// Wall-clock times of runs back to back.
pub fn time(work: &mut impl Work, runs: usize) -> Result<Vec<Duration>> {
    (0..runs).map(|_| elapsed(|| work.run())).collect()
}

/// Refuses a timer that stops before the device does, as one without a synchronise at its end: that measures launches.
///
/// Right after each timed run a value of the image is read, then read again. The first read waits for whatever the
/// device still has to do, the second is the cost of reading; the difference is what the timer missed.
pub fn check(work: &mut impl Work) -> Result {
    // A first read may have a kernel to compile.
    work.run()?;
    work.read()?;
    let (mut timed, mut missed) = (Vec::new(), Vec::new());
    for _ in 0..CHECK_RUNS {
        timed.push(elapsed(|| work.run())?);
        let wait = elapsed(|| work.read())?;
        missed.push(wait.saturating_sub(elapsed(|| work.read())?));
    }
    let (timed, missed) = (median(&timed), median(&missed));
    if missed.as_secs_f64() <= TOLERANCE * (timed + missed).as_secs_f64() {
        return Ok(());
    }
    let (timed, missed) = (milliseconds(timed), milliseconds(missed));
    Err(format!(
        "the timer stopped before the device did: it read {timed:.2} ms with {missed:.2} ms of work left, so its times \
         are not those of the work"
    )
    .into())
}

/// The median; the mean of the middle two of an even number. At least one is needed.
pub fn median(times: &[Duration]) -> Duration {
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    let middle = sorted.len() / 2;
    if sorted.len().is_multiple_of(2) {
        (sorted[middle - 1] + sorted[middle]) / 2
    } else {
        sorted[middle]
    }
}

pub fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Waits for a tensor's last value.
pub fn read_last<const D: usize>(tensor: Tensor<D>) -> Result {
    let last = tensor
        .shape()
        .to_vec()
        .into_iter()
        .map(|size| size - 1..size)
        .collect::<Vec<_>>();
    let data = tensor.slice(last.as_slice()).try_into_data().map_err(device_failed)?;
    // The data may come only when it is looked at.
    std::hint::black_box(data.iter::<f32>().sum::<f32>());
    Ok(())
}

/// What a benchmark says of a device's own errors.
pub fn device_failed(error: impl std::fmt::Display) -> String {
    format!("the device failed: {error}")
}

fn elapsed(work: impl FnOnce() -> Result) -> Result<Duration> {
    let started = Instant::now();
    work()?;
    Ok(started.elapsed())
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

    use burn::tensor::{Device, Distribution};
    use burn_vae::DeviceName;

    use super::*;

    /// A device of its own thread that sleeps a while for each job, in order.
    struct Sleeper {
        jobs: SyncSender<(Duration, SyncSender<()>)>,
        last: Option<Receiver<()>>,
        synchronises: bool,
    }

    const DECODE: Duration = Duration::from_millis(20);

    impl Sleeper {
        fn new(synchronises: bool) -> Self {
            let (jobs, queue) = sync_channel::<(Duration, SyncSender<()>)>(1000);
            std::thread::spawn(move || {
                for (duration, done) in queue {
                    std::thread::sleep(duration);
                    // Nobody may be waiting.
                    let _ = done.send(());
                }
            });
            Self {
                jobs,
                last: None,
                synchronises,
            }
        }

        fn enqueue(&mut self, duration: Duration) {
            let (done, last) = sync_channel(1);
            self.jobs.send((duration, done)).unwrap();
            self.last = Some(last);
        }

        fn wait(&mut self) {
            if let Some(last) = self.last.take() {
                last.recv().unwrap();
            }
        }
    }

    impl Work for Sleeper {
        fn run(&mut self) -> Result {
            self.enqueue(DECODE);
            if self.synchronises {
                self.wait();
            }
            Ok(())
        }

        fn read(&mut self) -> Result {
            self.enqueue(Duration::ZERO);
            self.wait();
            Ok(())
        }
    }

    #[test]
    fn a_timer_with_its_synchronise_passes_and_times_the_device() {
        let mut decode = Sleeper::new(true);
        check(&mut decode).unwrap();
        let times = time(&mut decode, 3).unwrap();
        assert!(times.iter().all(|&time| time >= DECODE), "{times:?}");
    }

    #[test]
    fn a_timer_without_the_last_synchronise_is_refused() {
        let error = check(&mut Sleeper::new(false)).unwrap_err().to_string();
        assert!(
            error.starts_with("the timer stopped before the device did: "),
            "{error}"
        );
    }

    /// One operation of a real device.
    struct Product {
        device: Device,
        factor: Tensor<2>,
        product: Option<Tensor<2>>,
        synchronises: bool,
    }

    impl Work for Product {
        fn run(&mut self) -> Result {
            self.product = Some(self.factor.clone().matmul(self.factor.clone()));
            if self.synchronises {
                self.device.sync()?;
            }
            Ok(())
        }

        fn read(&mut self) -> Result {
            let product = self.product.clone().ok_or("nothing was computed")?;
            read_last(product)
        }
    }

    #[test]
    fn a_timer_without_the_last_synchronise_is_refused_on_a_gpu() {
        for name in ["wgpu", "cuda"] {
            let device = match name.parse::<DeviceName>().unwrap().open() {
                Ok((device, _)) => device,
                Err(error) => {
                    let required = std::env::var("BURN_VAE_REQUIRE_DEVICE").is_ok_and(|required| required == name);
                    assert!(!required, "{error}");
                    eprintln!("skipped: {error}");
                    continue;
                }
            };
            let mut decode = Product {
                factor: Tensor::random([512, 512], Distribution::Default, &device),
                device,
                product: None,
                synchronises: true,
            };
            check(&mut decode).unwrap();
            decode.synchronises = false;
            let error = check(&mut decode).unwrap_err().to_string();
            println!("{name}: {error}");
            assert!(
                error.starts_with("the timer stopped before the device did: "),
                "{error}"
            );
        }
    }

    #[test]
    fn the_median_of_an_even_number_is_between_the_middle_two() {
        let times = |values: &[u64]| {
            values
                .iter()
                .map(|&value| Duration::from_millis(value))
                .collect::<Vec<_>>()
        };
        assert_eq!(median(&times(&[9, 1, 2])), Duration::from_millis(2));
        assert_eq!(median(&times(&[9, 1, 2, 4])), Duration::from_millis(3));
    }
}

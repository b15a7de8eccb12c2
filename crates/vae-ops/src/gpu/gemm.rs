//! Convolutions and matrix products as one implicit GEMM: `out[row][column] = sum over k of x[row][k] * w[column][k]`.
//!
//! Rows are pixels, columns output channels, and k runs over the window's taps and the input's channels; no patch matrix
//! exists, the loader finds each tap's pixel. Both engines share loader and epilogue: multiply-adds of f32, which any
//! device has, and tensor cores through cooperative matrices, which take f16 and bf16 and accumulate in f32.

use cubecl::{calculate_cube_count_elemwise, cmma, prelude::*, server::Handle};

use super::launch::{buffer, vector_size};

/// Which pixels an output reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Window {
    /// Taps on each axis.
    pub taps: u32,
    /// Output pixels on each axis that an input pixel becomes, each with weights of its own.
    pub phases: u32,
}

impl Window {
    pub const POINT: Self = Self { taps: 1, phases: 1 };
}

/// What multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Engine {
    /// Multiply-adds of f32 in registers.
    MultiplyAdd,
    /// 16x16x16 cooperative matrices of planes of 32.
    TensorCore,
}

/// How the work is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Tiling {
    pub engine: Engine,
    /// Rows and columns of the output that a cube computes.
    pub rows: u32,
    pub columns: u32,
    /// Length of k between two barriers.
    pub depth: u32,
    /// Planes along the rows; the others lie along the columns. Only for [`Engine::TensorCore`].
    pub row_planes: u32,
}

/// Units of every cube here.
const UNITS: u32 = 256;
const PLANE: u32 = 32;
/// Below this number of tiles, smaller ones are taken.
const FEW_TILES: usize = 128;
/// Side of a cooperative matrix.
const FRAGMENT: u32 = 16;
/// Side of the grid of units in [`Engine::MultiplyAdd`].
const SIDE: u32 = 16;

impl Tiling {
    /// The tiling for a product of this many rows and columns.
    pub fn new(engine: Engine, rows: usize, columns: usize) -> Self {
        let narrow = columns <= 16;
        // Few large tiles would leave most of a large device idle.
        let columns = if rows.div_ceil(128) * columns.div_ceil(128) < FEW_TILES {
            columns.min(64)
        } else {
            columns
        };
        match engine {
            Engine::MultiplyAdd => Self {
                engine,
                rows: 64,
                columns: if narrow { 16 } else { 64 },
                depth: 16,
                row_planes: 0,
            },
            Engine::TensorCore => Self {
                engine,
                rows: if columns == 64 && rows <= 4096 { 64 } else { 128 },
                columns: match columns {
                    0..=16 => 16,
                    17..=64 => 64,
                    _ => 128,
                },
                depth: 32,
                row_planes: match columns {
                    0..=16 => 8,
                    17..=64 => 4,
                    _ => 2,
                },
            },
        }
    }

    /// Elements between two rows of a tile in shared memory, padded against bank conflicts.
    fn pitch(&self) -> u32 {
        match self.engine {
            Engine::MultiplyAdd => self.depth,
            Engine::TensorCore => self.depth + 8,
        }
    }

    fn column_planes(&self) -> u32 {
        UNITS / PLANE / self.row_planes
    }

    /// Fragments of a plane along the rows and the columns.
    fn row_fragments(&self) -> u32 {
        self.rows / self.row_planes / FRAGMENT
    }
    fn column_fragments(&self) -> u32 {
        self.columns / self.column_planes() / FRAGMENT
    }
}

/// Sizes and strides, in elements.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
struct Problem {
    /// Pixels of all images.
    rows: u32,
    height: u32,
    width: u32,
    /// Output channels that are stored.
    columns: u32,
    /// Rows of the weights that exist, per phase; columns past them are zero.
    weight_rows: u32,
    channels_in: u32,
    x_offset: u32,
    x_stride: u32,
    weight_offset: u32,
    weight_stride: u32,
    out_offset: u32,
    out_stride: u32,
    row_tiles: u32,
    column_tiles: u32,
}

/// The place of a cube's tile.
#[derive(CubeType, Clone, Copy)]
struct Tile {
    row: u32,
    column: u32,
    phase_y: u32,
    phase_x: u32,
}

/// Loads `tile.depth` of k of some rows into registers: the part of this unit.
#[cube]
fn load_x<E: Float, V: Size>(
    x: &[Vector<E, V>],
    registers: &mut Array<Vector<E, V>>,
    row_y: &Array<i32>,
    row_x: &Array<i32>,
    row_image: &Array<u32>,
    problem: &Problem,
    block: u32,
    #[comptime] window: Window,
    #[comptime] tiling: Tiling,
    #[comptime] loads: u32,
) {
    let vector = V::value();
    let vector = comptime!(vector as u32);
    let vectors = comptime!(tiling.depth / vector);
    #[unroll]
    for i in 0..loads {
        let index = UNIT_POS + comptime!(i * UNITS);
        let k = block * comptime!(tiling.depth) + index % vectors * vector;
        let tap = k / problem.channels_in;
        let channel = k % problem.channels_in;
        let y = row_y[comptime!(i as usize)] + i32::cast_from(tap / comptime!(window.taps));
        let x_position = row_x[comptime!(i as usize)] + i32::cast_from(tap % comptime!(window.taps));
        let mut value = Vector::<E, V>::new(E::from_int(0));
        let inside = y >= 0
            && y < i32::cast_from(problem.height)
            && x_position >= 0
            && x_position < i32::cast_from(problem.width);
        if inside && tap < comptime!(window.taps * window.taps) {
            let pixel =
                row_image[comptime!(i as usize)] + u32::cast_from(y) * problem.width + u32::cast_from(x_position);
            let element = pixel as usize * problem.x_stride as usize + (problem.x_offset + channel) as usize;
            value = x[element / comptime!(vector as usize)];
        }
        registers[comptime!(i as usize)] = value;
    }
}

/// The same of the weights.
#[cube]
fn load_weight<E: Float, V: Size>(
    weight: &[Vector<E, V>],
    registers: &mut Array<Vector<E, V>>,
    problem: &Problem,
    column_tile: u32,
    phase: u32,
    block: u32,
    #[comptime] window: Window,
    #[comptime] tiling: Tiling,
    #[comptime] loads: u32,
) {
    let vector = V::value();
    let vector = comptime!(vector as u32);
    let vectors = comptime!(tiling.depth / vector);
    #[unroll]
    for i in 0..loads {
        let index = UNIT_POS + comptime!(i * UNITS);
        let k = block * comptime!(tiling.depth) + index % vectors * vector;
        let column = column_tile * comptime!(tiling.columns) + index / vectors;
        let mut value = Vector::<E, V>::new(E::from_int(0));
        let inside = index / vectors < comptime!(tiling.columns) && column < problem.weight_rows;
        if inside && k < comptime!(window.taps * window.taps) * problem.channels_in {
            let row = phase * problem.weight_rows + column;
            let element = row as usize * problem.weight_stride as usize + (problem.weight_offset + k) as usize;
            value = weight[element / comptime!(vector as usize)];
        }
        registers[comptime!(i as usize)] = value;
    }
}

/// Writes what was loaded as f32, k along the rows of shared memory.
#[cube]
fn store_f32<E: Float, V: Size>(
    registers: &Array<Vector<E, V>>,
    shared: &mut Shared<[f32]>,
    base: u32,
    #[comptime] depth: u32,
    #[comptime] extent: u32,
    #[comptime] loads: u32,
) {
    let vector = V::value();
    let vector = comptime!(vector as u32);
    let vectors = comptime!(depth / vector);
    #[unroll]
    for i in 0..loads {
        let index = UNIT_POS + comptime!(i * UNITS);
        let row = index / vectors;
        if row < extent {
            #[unroll]
            for lane in 0..vector {
                let k = index % vectors * vector + lane;
                let value = f32::cast_from(registers[comptime!(i as usize)].extract(comptime!(lane as usize)));
                shared[(base + k * comptime!(extent + 1) + row) as usize] = value;
            }
        }
    }
}

/// Writes what was loaded as it is, a row of shared memory for each row.
#[cube]
fn store_vectors<E: Float, V: Size>(
    registers: &Array<Vector<E, V>>,
    shared: &mut Shared<[Vector<E, V>]>,
    base: u32,
    #[comptime] tiling: Tiling,
    #[comptime] extent: u32,
    #[comptime] loads: u32,
) {
    let vector = V::value();
    let vector = comptime!(vector as u32);
    let vectors = comptime!(tiling.depth / vector);
    #[unroll]
    for i in 0..loads {
        let index = UNIT_POS + comptime!(i * UNITS);
        let row = index / vectors;
        if row < extent {
            let place = base + row * comptime!(tiling.pitch() / vector) + index % vectors;
            shared[place as usize] = registers[comptime!(i as usize)];
        }
    }
}

/// The vector of the output that starts at `row`, `column`: divided, biased, added to, rounded once, stored.
#[cube]
fn store_output<O: Float, W: Size>(
    sum: Vector<f32, W>,
    bias: &ComptimeOption<&[Vector<f32, W>]>,
    divisor: &ComptimeOption<&[f32]>,
    residual: &ComptimeOption<&[Vector<O, W>]>,
    out: &mut [Vector<O, W>],
    problem: &Problem,
    tile: &Tile,
    row: u32,
    column: u32,
    #[comptime] window: Window,
) {
    if row < problem.rows && column < problem.columns {
        let width = W::value();
        let mut value = sum;
        #[comptime]
        match divisor {
            ComptimeOption::Some(divisor) => value /= Vector::new(divisor[row as usize]),
            ComptimeOption::None => {}
        }
        #[comptime]
        match bias {
            ComptimeOption::Some(bias) => value += bias[column as usize / width],
            ComptimeOption::None => {}
        }
        let mut pixel = row as usize;
        if comptime!(window.phases > 1) {
            let phases = comptime!(window.phases);
            let x = row % problem.width;
            let line = row / problem.width;
            // `line` counts the lines of all images, so doubling it needs no division by the height.
            let line_out = (line * phases + tile.phase_y) as usize;
            pixel = line_out * (problem.width * phases) as usize + (x * phases + tile.phase_x) as usize;
        }
        let element = pixel * problem.out_stride as usize + (problem.out_offset + column) as usize;
        #[comptime]
        match residual {
            ComptimeOption::Some(residual) => value += Vector::cast_from(residual[element / width]),
            ComptimeOption::None => {}
        }
        out[element / width] = Vector::cast_from(value);
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn implicit_gemm_kernel<E: Float, O: Float, V: Size, W: Size>(
    x: &[Vector<E, V>],
    weight: &[Vector<E, V>],
    bias: ComptimeOption<&[Vector<f32, W>]>,
    divisor: ComptimeOption<&[f32]>,
    residual: ComptimeOption<&[Vector<O, W>]>,
    out: &mut [Vector<O, W>],
    problem: Problem,
    #[comptime] window: Window,
    #[comptime] tiling: Tiling,
    #[define(E, O)] _dtypes: [ElemType; 2],
) {
    let vector = V::value();
    let vector = comptime!(vector as u32);
    let x_loads = comptime!((tiling.rows * tiling.depth / vector).div_ceil(UNITS));
    let weight_loads = comptime!((tiling.columns * tiling.depth / vector).div_ceil(UNITS));

    let place = CUBE_POS as u32;
    let tiles = problem.row_tiles * problem.column_tiles;
    let phase = place / tiles;
    if phase >= comptime!(window.phases * window.phases) {
        terminate!();
    }
    // Cubes that run together share rows and differ in columns: x comes from the cache.
    let tile = Tile {
        row: place % tiles / problem.column_tiles,
        column: place % problem.column_tiles,
        phase_y: phase / comptime!(window.phases),
        phase_x: phase % comptime!(window.phases),
    };

    // Where the window of each row that this unit loads begins.
    let mut row_y = Array::<i32>::new(comptime!(x_loads as usize));
    let mut row_x = Array::<i32>::new(comptime!(x_loads as usize));
    let mut row_image = Array::<u32>::new(comptime!(x_loads as usize));
    let image_pixels = problem.height * problem.width;
    #[unroll]
    for i in 0..x_loads {
        let index = (UNIT_POS + comptime!(i * UNITS)) / comptime!(tiling.depth / vector);
        let row = tile.row * comptime!(tiling.rows) + index;
        let pixel = row % image_pixels;
        let half = comptime!(window.taps as i32 / 2);
        let mut y = i32::cast_from(pixel / problem.width) - half;
        let mut x = i32::cast_from(pixel % problem.width) - half;
        if comptime!(window.phases > 1) {
            y += i32::cast_from(tile.phase_y);
            x += i32::cast_from(tile.phase_x);
        }
        if index >= comptime!(tiling.rows) || row >= problem.rows {
            // Outside of any image.
            y = comptime!(-1_000_000i32).runtime();
        }
        row_y[comptime!(i as usize)] = y;
        row_x[comptime!(i as usize)] = x;
        row_image[comptime!(i as usize)] = row / image_pixels * image_pixels;
    }

    let mut x_registers = Array::<Vector<E, V>>::new(comptime!(x_loads as usize));
    let mut weight_registers = Array::<Vector<E, V>>::new(comptime!(weight_loads as usize));
    let blocks = (comptime!(window.taps * window.taps) * problem.channels_in).div_ceil(comptime!(tiling.depth));

    load_x(
        x,
        &mut x_registers,
        &row_y,
        &row_x,
        &row_image,
        &problem,
        0u32,
        window,
        tiling,
        x_loads,
    );
    load_weight(
        weight,
        &mut weight_registers,
        &problem,
        tile.column,
        phase,
        0u32,
        window,
        tiling,
        weight_loads,
    );

    if comptime!(tiling.engine == Engine::MultiplyAdd) {
        let row_items = comptime!(tiling.rows / SIDE);
        let column_items = comptime!(tiling.columns / SIDE);
        let x_size = comptime!(tiling.depth * (tiling.rows + 1));
        let weight_size = comptime!(tiling.depth * (tiling.columns + 1));
        let mut x_shared = Shared::<[f32]>::new_slice(comptime!(2 * x_size as usize));
        let mut weight_shared = Shared::<[f32]>::new_slice(comptime!(2 * weight_size as usize));
        let unit_row = UNIT_POS / comptime!(SIDE);
        let unit_column = UNIT_POS % comptime!(SIDE);

        let mut sums = Array::<f32>::new(comptime!((row_items * column_items) as usize));
        #[unroll]
        for i in 0..comptime!((row_items * column_items) as usize) {
            sums[i] = 0.0;
        }
        store_f32(&x_registers, &mut x_shared, 0u32, tiling.depth, tiling.rows, x_loads);
        store_f32(
            &weight_registers,
            &mut weight_shared,
            0u32,
            tiling.depth,
            tiling.columns,
            weight_loads,
        );
        sync_cube();
        for block in 0..blocks {
            let next = block + 1;
            if next < blocks {
                load_x(
                    x,
                    &mut x_registers,
                    &row_y,
                    &row_x,
                    &row_image,
                    &problem,
                    next,
                    window,
                    tiling,
                    x_loads,
                );
                load_weight(
                    weight,
                    &mut weight_registers,
                    &problem,
                    tile.column,
                    phase,
                    next,
                    window,
                    tiling,
                    weight_loads,
                );
            }
            let x_base = block % 2 * x_size;
            let weight_base = block % 2 * weight_size;
            // Unrolled for speed, and because Mesa's lavapipe ends a shader after 65,535 iterations in all.
            #[unroll]
            for k in 0..comptime!(tiling.depth) {
                let mut x_values = Array::<f32>::new(comptime!(row_items as usize));
                #[unroll]
                for i in 0..row_items {
                    let at = x_base + k * comptime!(tiling.rows + 1) + unit_row + comptime!(i * SIDE);
                    x_values[comptime!(i as usize)] = x_shared[at as usize];
                }
                #[unroll]
                for j in 0..column_items {
                    let at = weight_base + k * comptime!(tiling.columns + 1) + unit_column + comptime!(j * SIDE);
                    let w = weight_shared[at as usize];
                    #[unroll]
                    for i in 0..row_items {
                        sums[comptime!((i * column_items + j) as usize)] += x_values[comptime!(i as usize)] * w;
                    }
                }
            }
            if next < blocks {
                store_f32(
                    &x_registers,
                    &mut x_shared,
                    next % 2 * x_size,
                    tiling.depth,
                    tiling.rows,
                    x_loads,
                );
                store_f32(
                    &weight_registers,
                    &mut weight_shared,
                    next % 2 * weight_size,
                    tiling.depth,
                    tiling.columns,
                    weight_loads,
                );
            }
            sync_cube();
        }
        #[unroll]
        for i in 0..row_items {
            let row = tile.row * comptime!(tiling.rows) + unit_row + comptime!(i * SIDE);
            #[unroll]
            for j in 0..column_items {
                let column = tile.column * comptime!(tiling.columns) + unit_column + comptime!(j * SIDE);
                let sum = Vector::<f32, W>::new(sums[comptime!((i * column_items + j) as usize)]);
                store_output(
                    sum, &bias, &divisor, &residual, out, &problem, &tile, row, column, window,
                );
            }
        }
    } else {
        let pitch = comptime!(tiling.pitch());
        let x_size = comptime!(tiling.rows * pitch / vector);
        let weight_size = comptime!(tiling.columns * pitch / vector);
        let mut x_shared = Shared::<[Vector<E, V>]>::new_aligned_slice(comptime!(2 * x_size as usize), 16usize);
        let mut weight_shared =
            Shared::<[Vector<E, V>]>::new_aligned_slice(comptime!(2 * weight_size as usize), 16usize);
        let row_fragments = comptime!(tiling.row_fragments());
        let column_fragments = comptime!(tiling.column_fragments());
        let plane = UNIT_POS / comptime!(PLANE);
        let lane = UNIT_POS % comptime!(PLANE);
        let plane_row = plane / comptime!(tiling.column_planes()) * comptime!(row_fragments * FRAGMENT);
        let plane_column = plane % comptime!(tiling.column_planes()) * comptime!(column_fragments * FRAGMENT);

        let mut sums = Sequence::<cmma::Matrix<f32>>::new();
        #[unroll]
        for _ in 0..comptime!(row_fragments * column_fragments) {
            sums.push(cmma::Matrix::<f32>::from_value(
                cmma::MatrixIdent::Accumulator,
                comptime!(FRAGMENT as usize),
                comptime!(FRAGMENT as usize),
                comptime!(FRAGMENT as usize),
                cmma::MatrixLayout::Undefined,
                0.0f32,
            ));
        }
        store_vectors(&x_registers, &mut x_shared, 0u32, tiling, tiling.rows, x_loads);
        store_vectors(
            &weight_registers,
            &mut weight_shared,
            0u32,
            tiling,
            tiling.columns,
            weight_loads,
        );
        sync_cube();
        for block in 0..blocks {
            let next = block + 1;
            if next < blocks {
                load_x(
                    x,
                    &mut x_registers,
                    &row_y,
                    &row_x,
                    &row_image,
                    &problem,
                    next,
                    window,
                    tiling,
                    x_loads,
                );
                load_weight(
                    weight,
                    &mut weight_registers,
                    &problem,
                    tile.column,
                    phase,
                    next,
                    window,
                    tiling,
                    weight_loads,
                );
            }
            let x_base = block % 2 * x_size;
            let weight_base = block % 2 * weight_size;
            #[unroll]
            for step in 0..comptime!(tiling.depth / FRAGMENT) {
                let mut rows = Sequence::<cmma::Matrix<Vector<E, V>>>::new();
                #[unroll]
                for i in 0..row_fragments {
                    let at =
                        x_base + ((plane_row + comptime!(i * FRAGMENT)) * pitch + comptime!(step * FRAGMENT)) / vector;
                    rows.push(cmma::Matrix::<Vector<E, V>>::from_slice(
                        cmma::MatrixIdent::A,
                        comptime!(FRAGMENT as usize),
                        comptime!(FRAGMENT as usize),
                        comptime!(FRAGMENT as usize),
                        cmma::MatrixLayout::RowMajor,
                        &x_shared[at as usize..comptime!(2 * x_size as usize)],
                        pitch,
                    ));
                }
                #[unroll]
                for j in 0..column_fragments {
                    let at = weight_base
                        + ((plane_column + comptime!(j * FRAGMENT)) * pitch + comptime!(step * FRAGMENT)) / vector;
                    let columns = cmma::Matrix::<Vector<E, V>>::from_slice(
                        cmma::MatrixIdent::B,
                        comptime!(FRAGMENT as usize),
                        comptime!(FRAGMENT as usize),
                        comptime!(FRAGMENT as usize),
                        cmma::MatrixLayout::ColMajor,
                        &weight_shared[at as usize..comptime!(2 * weight_size as usize)],
                        pitch,
                    );
                    #[unroll]
                    for i in 0..row_fragments {
                        let sum = sums.index(comptime!((i * column_fragments + j) as usize));
                        cmma::execute(rows.index(comptime!(i as usize)), &columns, sum, sum);
                    }
                }
            }
            if next < blocks {
                store_vectors(
                    &x_registers,
                    &mut x_shared,
                    next % 2 * x_size,
                    tiling,
                    tiling.rows,
                    x_loads,
                );
                store_vectors(
                    &weight_registers,
                    &mut weight_shared,
                    next % 2 * weight_size,
                    tiling,
                    tiling.columns,
                    weight_loads,
                );
            }
            sync_cube();
        }

        // A fragment's layout is the device's secret: each plane spells its fragments out in shared memory.
        let mut patches =
            Shared::<[f32]>::new_aligned_slice(comptime!((UNITS / PLANE * FRAGMENT * FRAGMENT) as usize), 32usize);
        let patch = plane * comptime!(FRAGMENT * FRAGMENT);
        let patch_end = patch + comptime!(FRAGMENT * FRAGMENT);
        let width = W::value();
        let width = comptime!(width as u32);
        let row_vectors = comptime!(FRAGMENT / width);
        #[unroll]
        for i in 0..row_fragments {
            #[unroll]
            for j in 0..column_fragments {
                cmma::store(
                    &mut patches[patch as usize..patch_end as usize],
                    sums.index(comptime!((i * column_fragments + j) as usize)),
                    FRAGMENT,
                    cmma::MatrixLayout::RowMajor,
                );
                sync_plane();
                #[unroll]
                for item in 0..comptime!((FRAGMENT * row_vectors).div_ceil(PLANE)) {
                    let index = lane + comptime!(item * PLANE);
                    if index < comptime!(FRAGMENT * row_vectors) {
                        let patch_row = index / row_vectors;
                        let patch_column = index % row_vectors * width;
                        let mut sum = Vector::<f32, W>::new(0.0);
                        #[unroll]
                        for k in 0..width {
                            let at = patch + patch_row * comptime!(FRAGMENT) + patch_column + k;
                            sum.insert(comptime!(k as usize), patches[at as usize]);
                        }
                        let row = tile.row * comptime!(tiling.rows) + plane_row + comptime!(i * FRAGMENT) + patch_row;
                        let column = tile.column * comptime!(tiling.columns)
                            + plane_column
                            + comptime!(j * FRAGMENT)
                            + patch_column;
                        store_output(
                            sum, &bias, &divisor, &residual, out, &problem, &tile, row, column, window,
                        );
                    }
                }
                sync_plane();
            }
        }
    }
}

/// A product to compute; strides and offsets in elements.
pub(super) struct Gemm<'a> {
    pub window: Window,
    pub engine: Engine,
    /// Elements of x and the weights, and of the output and the residual.
    pub dtype: ElemType,
    pub out_dtype: ElemType,
    pub batch: usize,
    pub height: usize,
    pub width: usize,
    pub channels_in: usize,
    pub channels_out: usize,
    pub x: Operand<'a>,
    /// `[phases^2, rows, taps^2 * channels_in]`
    pub weight: Operand<'a>,
    /// Rows of the weights, if fewer than `channels_out`; the columns past them become zero (and bias).
    pub weight_rows: usize,
    pub bias: Option<&'a Handle>,
    /// Divides each row of the sums.
    pub divisor: Option<&'a Handle>,
    /// In the output's layout.
    pub residual: Option<&'a Handle>,
    pub out: Operand<'a>,
}

/// A matrix inside a buffer.
#[derive(Clone, Copy)]
pub(super) struct Operand<'a> {
    pub handle: &'a Handle,
    pub offset: usize,
    pub stride: usize,
}

impl<'a> Operand<'a> {
    /// A contiguous one.
    pub fn packed(handle: &'a Handle, stride: usize) -> Self {
        Self {
            handle,
            offset: 0,
            stride,
        }
    }
}

impl Gemm<'_> {
    /// Enqueues the kernel.
    pub fn launch(self, client: &Client) {
        let taps = (self.window.taps * self.window.taps) as usize;
        let phases = (self.window.phases * self.window.phases) as usize;
        let rows = self.batch * self.height * self.width;
        let tiling = Tiling::new(self.engine, rows * phases, self.channels_out);
        let row_tiles = rows.div_ceil(tiling.rows as usize);
        let column_tiles = self.channels_out.div_ceil(tiling.columns as usize);

        let inputs = [
            self.channels_in,
            self.x.offset,
            self.x.stride,
            self.weight.offset,
            self.weight.stride,
        ];
        let vector = vector_size(client, self.dtype, inputs.into_iter().fold(0, gcd));
        let outputs = [self.channels_out, self.out.offset, self.out.stride];
        let out_vector = match self.engine {
            Engine::MultiplyAdd => 1,
            Engine::TensorCore => vector_size(client, self.out_dtype, outputs.into_iter().fold(0, gcd)),
        };

        let x_len = self.x.offset + (rows - 1) * self.x.stride + self.channels_in;
        let weight_len =
            self.weight.offset + (phases * self.weight_rows - 1) * self.weight.stride + taps * self.channels_in;
        let out_len = self.out.offset + (rows * phases - 1) * self.out.stride + self.channels_out;
        let problem = ProblemLaunch::new(
            index(rows),
            index(self.height),
            index(self.width),
            index(self.channels_out),
            index(self.weight_rows),
            index(self.channels_in),
            index(self.x.offset),
            index(self.x.stride),
            index(self.weight.offset),
            index(self.weight.stride),
            index(self.out.offset),
            index(self.out.stride),
            index(row_tiles),
            index(column_tiles),
        );
        let cube_dim = CubeDim::new_1d(UNITS);
        let cubes = row_tiles * column_tiles * phases;
        // Safety: the loaders and the epilogue check rows and columns against `problem`, whose sizes are those of the
        // buffers.
        unsafe {
            implicit_gemm_kernel::launch_unchecked(
                client,
                calculate_cube_count_elemwise(client, cubes * UNITS as usize, cube_dim),
                cube_dim,
                AddressType::from_len(x_len.max(weight_len).max(out_len)),
                vector,
                out_vector,
                buffer(self.x.handle, x_len.div_ceil(vector)),
                buffer(self.weight.handle, weight_len.div_ceil(vector)),
                self.bias
                    .map(|bias| buffer(bias, self.channels_out / out_vector))
                    .into(),
                self.divisor.map(|divisor| buffer(divisor, rows)).into(),
                self.residual
                    .map(|residual| buffer(residual, out_len / out_vector))
                    .into(),
                buffer(self.out.handle, out_len.div_ceil(out_vector)),
                problem,
                self.window,
                tiling,
                [self.dtype, self.out_dtype],
            )
        }
    }
}

/// A size or an offset as kernels count them.
fn index(value: usize) -> u32 {
    u32::try_from(value).expect("a product of tensors that callers keep below 2^31 elements")
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Every form of the kernel, as CUDA C++.
#[cfg(all(test, feature = "hopper"))]
pub(super) fn emit_all() {
    use super::emit::{device_properties, emit, settings, target_properties};
    use cubecl::ir::FloatKind;

    let argument = || BufferCompilationArg { inplace: None };
    for (engine, float, vector, out_vector) in [
        (Engine::MultiplyAdd, FloatKind::F32, 4, 1),
        (Engine::TensorCore, FloatKind::BF16, 8, 8),
        (Engine::TensorCore, FloatKind::F16, 4, 2),
    ] {
        for (window, name) in [
            (Window::POINT, "point"),
            (Window { taps: 3, phases: 1 }, "square"),
            (Window { taps: 2, phases: 2 }, "upsample"),
        ] {
            for columns in [16, 64, 128] {
                let tiling = Tiling::new(engine, 1 << 20, columns);
                let dtype = ElemType::Float(float);
                let kernel = implicit_gemm_kernel::ImplicitGemmKernel::new(
                    settings(CubeDim::new_1d(UNITS)),
                    device_properties(),
                    target_properties(),
                    argument(),
                    argument(),
                    ComptimeOptionCompilationArg::Some(argument()),
                    ComptimeOptionCompilationArg::None,
                    ComptimeOptionCompilationArg::Some(argument()),
                    argument(),
                    ProblemCompilationArg {
                        rows: (),
                        height: (),
                        width: (),
                        columns: (),
                        weight_rows: (),
                        channels_in: (),
                        x_offset: (),
                        x_stride: (),
                        weight_offset: (),
                        weight_stride: (),
                        out_offset: (),
                        out_stride: (),
                        row_tiles: (),
                        column_tiles: (),
                    },
                    vector,
                    out_vector,
                    window,
                    tiling,
                    [dtype, dtype],
                );
                emit(&format!("gemm_{engine:?}_{float:?}_{name}_{columns}"), &kernel);
            }
        }
    }
}

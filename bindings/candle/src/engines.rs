//! The engine of each device: one for the host processor and one for each CUDA context.

use crate::memory::Place;
use crate::{Error, error::Result};
use candle_core::Device;
use flashtune::{Builder, DeviceSpec, Engine};
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, PoisonError, RwLock};

/// What an engine computes on: the host processor, or the CUDA context at an address.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Key {
    Cpu,
    #[cfg(feature = "cuda")]
    Context(usize),
}

// An engine holds its context, so that no other one comes to lie at its address.
static ENGINES: LazyLock<RwLock<HashMap<Key, Arc<Engine>>>> = LazyLock::new(RwLock::default);

/// Settings for an engine on a device: on CUDA in candle's own context. What is not set is what the environment says
/// (`FLASHTUNE_CACHE`, `FLASHTUNE_BUNDLES`, ...).
///
/// # Errors
/// [`Error::Argument`] for Metal; [`Error::Engine`] when the device cannot be used.
pub fn engine_builder(device: &Device) -> candle_core::Result<Builder> {
    Ok(builder(&Place::of(device)?)?)
}

/// The engine that computes on a device: that of [`set_engine`], else one with the settings of the environment, which
/// the first call makes.
///
/// # Errors
/// As [`engine_builder`], and what [`Builder::build`] says.
pub fn engine(device: &Device) -> candle_core::Result<Arc<Engine>> {
    Ok(of_place(&Place::of(device)?)?)
}

/// Computes on this engine whatever lies on the device, from now on. Gives back the engine before, if there was one.
///
/// On CUDA the engine works in candle's context: make it by [`engine_builder`].
///
/// # Errors
/// [`Error::Argument`] when the engine is of another device.
pub fn set_engine(device: &Device, engine: Arc<Engine>) -> candle_core::Result<Option<Arc<Engine>>> {
    let place = Place::of(device)?;
    check_device(&place, engine.device().spec())?;
    Ok(ENGINES.write().unwrap_or_else(PoisonError::into_inner).insert(place.key(), engine))
}

pub(crate) fn of_place(place: &Place) -> Result<Arc<Engine>> {
    let key = place.key();
    if let Some(engine) = ENGINES.read().unwrap_or_else(PoisonError::into_inner).get(&key) {
        return Ok(engine.clone());
    }
    let mut engines = ENGINES.write().unwrap_or_else(PoisonError::into_inner);
    if let Some(engine) = engines.get(&key) {
        return Ok(engine.clone());
    }
    let engine = Arc::new(builder(place)?.build()?);
    engines.insert(key, engine.clone());
    Ok(engine)
}

fn builder(place: &Place) -> Result<Builder> {
    match place {
        Place::Cpu => Ok(Engine::builder().device(DeviceSpec::Cpu)),
        #[cfg(feature = "cuda")]
        Place::Cuda { stream, .. } => {
            let device = flashtune::device::CudaDevice::of_context(stream.context()).map_err(flashtune::Error::from)?;
            Ok(Engine::builder().on(device))
        }
    }
}

fn check_device(place: &Place, engine: Option<DeviceSpec>) -> Result<()> {
    let fits = match (place, engine) {
        (Place::Cpu, spec) => spec == Some(DeviceSpec::Cpu),
        #[cfg(feature = "cuda")]
        (Place::Cuda { stream, .. }, Some(spec)) => spec == DeviceSpec::Cuda(stream.context().ordinal()),
        // A context that a host made has no name.
        #[cfg(feature = "cuda")]
        (Place::Cuda { .. }, None) => true,
    };
    if fits {
        return Ok(());
    }
    let found = engine.map_or("a context".to_owned(), |spec| spec.to_string());
    let expected = format!("tensors are on {}", place.name());
    Err(Error::argument("engine", found, expected, "make it by `engine_builder` of the same device"))
}

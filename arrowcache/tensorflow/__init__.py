"""TensorFlow: the same cache as a `tf.data.Dataset`. Importing this package imports tensorflow."""

try:
    from arrowcache.tensorflow.examples import example_parser
    from arrowcache.tensorflow.pipeline import dataset
    from arrowcache.tensorflow.tfrecord import from_tfrecords, to_tfrecords
    from arrowcache.tensorflow.tfrecord_source import TFRecordFiles
except ModuleNotFoundError as error:
    raise ImportError(
        f"arrowcache.tensorflow needs {error.name}, which is not installed: "
        "pip install 'arrowcache[tensorflow]'"
    ) from error

__all__ = ["TFRecordFiles", "dataset", "example_parser", "from_tfrecords", "to_tfrecords"]

"""TensorFlow: the same cache as a `tf.data.Dataset`. Importing this package imports tensorflow."""

from arrowcache.tensorflow.dataset import dataset

__all__ = ["dataset"]

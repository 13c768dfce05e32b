"""Loads Keras as a side effect of importing this module.

``TF_USE_LEGACY_KERAS`` selects the version of Keras that ``tf.keras`` refers to. The process from which workers are
forked imports this module once for all workers.
"""

import tensorflow as tf

_ = tf.keras.layers

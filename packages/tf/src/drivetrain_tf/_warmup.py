"""Imported for its side effect: loads the Keras behind ``tf.keras``, which ``TF_USE_LEGACY_KERAS`` selects.

The process that workers are forked from imports it once for all workers.
"""

import tensorflow as tf

_ = tf.keras.layers

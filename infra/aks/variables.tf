variable "subscription_id" {
  description = "Azure subscription (a GUID)."
  type        = string

  validation {
    condition     = can(regex("^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$", var.subscription_id))
    error_message = "subscription_id must be a GUID: az account show --query id."
  }
}

variable "name" {
  description = "Name of the resource group, the cluster and everything in it."
  type        = string

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,18}[a-z0-9]$", var.name))
    error_message = "name must have 3 to 20 lower-case letters, digits and dashes and start with a letter."
  }
}

variable "location" {
  description = "Azure region with quota for the GPU machines, for example southcentralus."
  type        = string

  validation {
    condition     = can(regex("^[a-z]+[a-z0-9]*$", var.location))
    error_message = "location must be a region's short name: southcentralus."
  }
}

variable "kubernetes_version" {
  description = "Kubernetes version, major.minor; null means AKS's default."
  type        = string
  default     = null

  validation {
    condition     = var.kubernetes_version == null || can(regex("^1\\.[0-9]+$", var.kubernetes_version))
    error_message = "kubernetes_version must look like 1.33."
  }
}

variable "gpu_vm_size" {
  description = "Machine type of the GPU pool."
  type        = string
  default     = "Standard_ND96isr_H100_v5"

  validation {
    condition = contains([
      "Standard_ND96isr_H100_v5", "Standard_ND96isr_H200_v5", "Standard_ND96asr_v4", "Standard_ND96amsr_A100_v4",
      "Standard_NC24ads_A100_v4",
    ], var.gpu_vm_size)
    error_message = "gpu_vm_size must be an ND (InfiniBand) machine or Standard_NC24ads_A100_v4."
  }
}

variable "gpu_nodes" {
  description = "Number of GPU nodes."
  type        = number
  default     = 2

  validation {
    condition     = var.gpu_nodes >= 0 && var.gpu_nodes <= 1000 && floor(var.gpu_nodes) == var.gpu_nodes
    error_message = "gpu_nodes must be a whole number from 0 to 1000."
  }
}

variable "lustre" {
  description = "Azure Managed Lustre for the cluster; null for none. The size is a multiple of the tier's step."
  type = object({
    sku_name    = string
    size_tib    = number
    zone        = string
    day_of_week = optional(string, "Sunday")
    time_utc    = optional(string, "22:00")
  })
  default = null

  validation {
    condition = var.lustre == null || contains(
      ["AMLFS-Durable-Premium-40", "AMLFS-Durable-Premium-125", "AMLFS-Durable-Premium-250", "AMLFS-Durable-Premium-500"],
      try(var.lustre.sku_name, ""),
    )
    error_message = "lustre.sku_name must be AMLFS-Durable-Premium-40, -125, -250 or -500."
  }

  validation {
    condition = var.lustre == null || try(var.lustre.size_tib % lookup({
      "AMLFS-Durable-Premium-40"  = 48
      "AMLFS-Durable-Premium-125" = 16
      "AMLFS-Durable-Premium-250" = 8
      "AMLFS-Durable-Premium-500" = 4
    }, var.lustre.sku_name, 1) == 0 && var.lustre.size_tib > 0, false)
    error_message = "lustre.size_tib must be a multiple of 48 (40), 16 (125), 8 (250) or 4 (500)."
  }
}

variable "lustre_from_claims" {
  description = "Whether claims may create file systems (charts/shared-storage with amlfs.skuName). Not together with lustre: a cluster's file system has one owner."
  type        = bool
  default     = false

  validation {
    condition     = var.lustre_from_claims != null
    error_message = "lustre_from_claims must be true or false."
  }
}

variable "lustre_driver_version" {
  description = "Release of the Azure Lustre CSI driver, which is installed with lustre or lustre_from_claims."
  type        = string
  default     = "v0.4.0"

  validation {
    condition     = can(regex("^v[0-9]+\\.[0-9]+\\.[0-9]+$", var.lustre_driver_version))
    error_message = "lustre_driver_version must look like v0.4.0."
  }
}

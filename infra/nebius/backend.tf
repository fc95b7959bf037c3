# The state lies in a bucket of the project, so that it outlives this machine and all of the team plan from the same one.
# .envrc makes the bucket and a key for it, and says bucket, region and address to Terraform.
terraform {
  backend "s3" {
    key            = "soperator.tfstate"
    use_path_style = true

    # It is not Amazon that answers.
    skip_credentials_validation = true
    skip_metadata_api_check     = true
    skip_region_validation      = true
    skip_requesting_account_id  = true
    skip_s3_checksum            = true
  }
}
